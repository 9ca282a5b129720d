// Products of 8-bit weights with 16-bit inputs, both integers with a scale for every 32.
//
// An input is rounded once, to a scale of its own row: 1/32639 of the largest of its 32.  Sums of 32
// products are integers, which are exact in any order; as floats, times both scales, they join the
// total in ascending order of k.  So matrix units, which take an input as two bytes, and vectors give
// the same bits.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace fs {

// A panel is [k/32][48] scales in bfloat16, to a multiple of 64 bytes, then
// [k/32][3 times 16 outputs][8 quads][16 outputs][4] integers, k padded with zeros.
int64_t w8a16_panel_bytes(int64_t k);
// Rows [0, rows) of w [..][k] to the panel at `data`, which holds zeros.
void w8a16_pack_panel(const float* w, int rows, int64_t k, void* data);
// Output `lane` of a panel as float32 [k].
void w8a16_unpack(const void* panel, int64_t lane, int64_t k, float* out);

// See gemm.h for these.
int64_t w8a16_ready_floats(int64_t rows, int64_t k);
void w8a16_ready(const float* x, int rows, int begin, int end, int k, float* out);
void w8a16_linear(const Packed& w, const float* x, int rows, int begin, int end, float* y,
                  int64_t y_stride, bool add);

}  // namespace fs
