// Linear layers y = x w^T with weights packed for it, in float32, bfloat16 and int8.
//
// Lanes of a vector are distinct outputs, and k runs from 0 to K - 1 in blocks of a fixed size: an
// output's bits depend on its row of x and its row of w alone, whatever the number of rows, how
// they are tiled, the instruction set or the number of threads.
#pragma once

#include <cstdint>

#include "simd.h"

namespace fs {

constexpr int PANEL = 48;  // outputs packed together

enum Kind { F32 = 0, BF16 = 1, I8 = 2 };

// Weights [n][k] as panels of 48 outputs, the last one padded with zeros:
//   F32, BF16  [n/48][k][48]
//   I8         [n/48][k/4][48][4], k padded to a multiple of 4; row r stands for scale[r] * integer
struct Packed {
    const void* data;
    const float* scale;   // I8: [panels * 48]
    const int32_t* sums;  // I8: [panels * 48], 128 * the sum of a row's integers
    const float* bias;    // [panels * 48], or null
    int n, k;
    int kind;

    int panels() const { return (n + PANEL - 1) / PANEL; }
};

int64_t packed_bytes(int kind, int64_t n, int64_t k);

// Rows [0, count) of w (float32, row stride k) to outputs [first, first + count) of the packing.
// `first` is a multiple of 48, and so is `count` unless these are the last rows.
void pack(int kind, const float* w, int64_t first, int64_t count, int64_t k, void* data,
          float* scale, int32_t* sums);

// Row `index` of the weights as float32 [k]: the embedding of a token.
void unpack_row(const Packed& w, int64_t index, float* out);

// A block of rows as the product takes it.  F32 and BF16 weights read `x`, I8 weights read
// integers that `quantise` makes, with one scale a row.
struct Rows {
    const float* x;
    int64_t stride;  // floats from row to row of x
    uint8_t* q;      // I8: [rows][padded k], integer + 128
    float* scale;    // I8: [rows]
    int count;
};

FS_INLINE int64_t padded(int64_t k) { return (k + 3) / 4 * 4; }

// Rows [begin, end) of `rows.x` to `rows.q` and `rows.scale`: integers in -127..127, scaled so that
// the largest of a row is 127.
void quantise(const Rows& rows, int k, int begin, int end);

// Outputs of panels [begin, end) for all rows: y[row][output] = product + bias, or += with `add`.
void linear(const Packed& w, const Rows& rows, int begin, int end, float* y, int64_t y_stride,
            bool add);

}  // namespace fs

// As `packed_bytes` and `pack`, on `threads` threads.
FS_API int64_t fs_packed_bytes(int kind, int64_t n, int64_t k);
FS_API void fs_pack(int kind, const float* w, int64_t n, int64_t k, void* data, float* scale,
                    int32_t* sums, int threads);
// For tests: y [m][n] = x [m][k] w^T on a team of its own.
FS_API void fs_linear(const fs::Packed* w, const float* x, int64_t m, float* y, int threads);
