// Linear layers y = x w^T with weights packed for it, in float32, bfloat16, int8 and w8a16.
//
// Lanes of a vector are distinct outputs, and k runs from 0 to K - 1 in blocks of a fixed size: an
// output's bits depend on its row of x and its row of w alone, whatever the number of rows, how
// they are tiled, the instruction set or the number of threads.  x is float32 with weights in float32
// and int8; with weights in bfloat16 it is rounded to the same, and in w8a16 to integers of 16 bits
// (those of 8 would cost three times the accuracy).
#pragma once

#include <cstdint>

#include "simd.h"

namespace fs {

constexpr int PANEL = 48;      // outputs packed together
constexpr int I8_BLOCK = 32;  // weights of an output that share a scale

enum Kind { F32 = 0, BF16 = 1, I8 = 2, W8A16 = 3 };

// Weights [n][k] as panels of 48 outputs, the last one padded with zeros:
//   F32        [n/48][k][48]
//   BF16       as of gemm_bf16.h, which has the products too
//   I8         [n/48][k/32] blocks of [32][48] integers, then [48] scales in bfloat16; a weight is
//              integer * scale.  The last block is padded with zeros.
//   W8A16      as of gemm_w8a16.h, likewise
struct Packed {
    const void* data;
    const float* bias;  // [panels * 48], or null
    int n, k;
    int kind;

    int panels() const { return (n + PANEL - 1) / PANEL; }
};

// Row `index` of the weights as float32 [k]: the embedding of a token.
void unpack_row(const Packed& w, int64_t index, float* out);

// Products with BF16 and W8A16 weights take their x made `ready`, the others as it is.
FS_INLINE bool takes_ready(const Packed& w) { return w.kind == BF16 || w.kind == W8A16; }
// Memory for `rows` rows of k inputs made ready for weights of a kind, in floats.
int64_t ready_floats(int kind, int64_t rows, int64_t k);
// Rows [begin, end) of the `rows` of x [rows][k], for products with w.
void ready(const Packed& w, const float* x, int rows, int begin, int end, float* out);

// Outputs of panels [begin, end) for `rows` rows of x, x_stride floats apart unless made ready:
// y[row][output] = product + bias, or += with `add`.
void linear(const Packed& w, const float* x, int64_t x_stride, int rows, int begin, int end,
            float* y, int64_t y_stride, bool add);

// Weights are read once, from end to end, and each takes so many instructions that the processor's
// own read-ahead stays short: without this a pass of few rows runs at a third of the memory's rate.
constexpr int AHEAD = 3072;  // bytes

// Fetch what follows the next BYTES of weights.
template <int BYTES>
FS_INLINE void fetch(const void* weights) {
    const char* from = (const char*)weights + AHEAD;
    __asm__("" : "+r"(from));  // one address, not a register for each line
    for (int at = 0; at < BYTES; at += 64) __builtin_prefetch(from + at);
}

// 16 sums, of which `valid` are outputs, to y.
FS_INLINE void finish(float* y, vf sum, const float* bias, int valid, bool add) {
    if (bias) sum = sum + load(bias);
    if (valid >= LANES) {
        store(y, add ? load(y) + sum : sum);
    } else if (valid > 0) {
        store_part(y, add ? load_part(y, valid) + sum : sum, valid);
    }
}

}  // namespace fs

FS_API int64_t fs_packed_bytes(int kind, int64_t n, int64_t k);
// w: float32 [n][k].  bfloat16 is rounded to nearest even.
// Returns 1 where the system gives no threads, else 0.
FS_API int fs_pack(int kind, const float* w, int64_t n, int64_t k, void* data, int threads);
// For tests: y [m][n] = x [m][k] w^T on a team of its own.  Returns 1 where the system gives no
// threads, else 0.
FS_API int fs_linear(const fs::Packed* w, const float* x, int64_t m, float* y, int threads);
