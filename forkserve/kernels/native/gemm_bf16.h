// Products with bfloat16 weights: x is rounded to bfloat16 too, sums are float32.
//
// The order of a sum is that of bf16.h, on matrix units and on vectors.  Which of them does a
// product depends on the number of rows, and no bit does.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace fs {

// A panel is [k/32][16 pairs][48 outputs][2], k padded with zeros to a multiple of 32.
int64_t bf16_panel_bytes(int64_t k);
// Rows [0, rows) of w [..][k] to the panel at `data`, which holds zeros.
void bf16_pack_panel(const float* w, int rows, int64_t k, uint16_t* data);
// Output `lane` of a panel as float32 [k].
void bf16_unpack(const uint16_t* panel, int64_t lane, int64_t k, float* out);

// See gemm.h for these.
int64_t bf16_ready_floats(int64_t rows, int64_t k);
void bf16_ready(const float* x, int rows, int begin, int end, int k, float* out);
void bf16_linear(const Packed& w, const float* x, int rows, int begin, int end, float* y,
                 int64_t y_stride, bool add);

}  // namespace fs
