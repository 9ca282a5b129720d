// The two products of attention in register tiles: scores of keys, and values weighted by them.
#pragma once

#include <type_traits>

#include "attention.h"

namespace fs {
namespace {

// A register tile is RB query vectors by NB blocks of 16 keys or values.  TILE is what the
// registers hold beside operands: 24 of 32, or 6 pairs of 16.
#if defined(__AVX512F__)
constexpr int TILE = 24;
#else
constexpr int TILE = 6;
#endif
constexpr int ROWS = 6;                // largest RB
constexpr int WIDE = 256 + LANES;      // floats from one query or output vector to the next
constexpr int SCORES = SPLIT + LANES;  // and from one row of scores to the next

// Inlined, or with loops that are unrolled late, sums of a register tile end up in memory.
#define FS_NOINLINE __attribute__((noinline))
#define FS_UNROLL _Pragma("GCC unroll 8")

constexpr int widest(int rows) { return rows * 4 <= TILE ? 4 : rows * 2 <= TILE ? 2 : 1; }

FS_INLINE vf load_kv(const float* p) { return load(p); }
FS_INLINE vf load_kv(const uint16_t* p) { return load_bf16(p); }

// scores[r][16 b + i] = sum over d, in order, of q[r][d] * key i of block b.
template <int RB, int NB, class T>
FS_NOINLINE void qk(const float* q, const T* const* block, int64_t step, int64_t dim,
                    float* scores) {
    vf sum[RB][NB];
    const T* k[NB];
    FS_UNROLL for (int b = 0; b < NB; b++) k[b] = block[b];
    FS_UNROLL for (int r = 0; r < RB; r++)
        FS_UNROLL for (int b = 0; b < NB; b++) sum[r][b] = zero();
    for (int64_t d = 0; d < dim; d++) {
        vf x[NB];
        FS_UNROLL for (int b = 0; b < NB; b++) {
            x[b] = load_kv(k[b]);
            k[b] += step;
        }
        FS_UNROLL for (int r = 0; r < RB; r++) {
            vf y = set1(q[r * WIDE + d]);
            FS_UNROLL for (int b = 0; b < NB; b++) sum[r][b] = fma(y, x[b], sum[r][b]);
        }
    }
    FS_UNROLL for (int r = 0; r < RB; r++)
        FS_UNROLL for (int b = 0; b < NB; b++) store(scores + r * SCORES + b * LANES, sum[r][b]);
}

template <int RB, int NB, class T>
void qk_rows(const float* q, const T* const* block, int n, int64_t step, int64_t dim,
             float* scores) {
    for (; n >= NB; n -= NB, block += NB, scores += NB * LANES)
        qk<RB, NB>(q, block, step, dim, scores);
    if constexpr (NB > 1)
        if (n) qk_rows<RB, NB / 2>(q, block, n, step, dim, scores);
}

// Consecutive rows of V.
template <class T>
struct Stretch {
    const T* v;
    int rows;
};

// o[r][i] += sum over rows j, in order, of p[r][j] * v[j][i] for NB blocks of 16 values.
template <int RB, int NB, class T>
FS_NOINLINE void pv(const float* p, const Stretch<T>* stretch, int n, int64_t at, int64_t dim,
                    float* o) {
    vf sum[RB][NB];
    FS_UNROLL for (int r = 0; r < RB; r++)
        FS_UNROLL for (int b = 0; b < NB; b++) sum[r][b] = load(o + r * WIDE + b * LANES);
    for (int i = 0; i < n; i++) {
        const T* v = stretch[i].v + at;
        for (int j = stretch[i].rows; j > 0; j--, p++, v += dim) {
            vf x[NB];
            FS_UNROLL for (int b = 0; b < NB; b++) x[b] = load_kv(v + b * LANES);
            FS_UNROLL for (int r = 0; r < RB; r++) {
                vf y = set1(p[r * SCORES]);
                FS_UNROLL for (int b = 0; b < NB; b++) sum[r][b] = fma(y, x[b], sum[r][b]);
            }
        }
    }
    FS_UNROLL for (int r = 0; r < RB; r++)
        FS_UNROLL for (int b = 0; b < NB; b++) store(o + r * WIDE + b * LANES, sum[r][b]);
}

template <int RB, int NB, class T>
void pv_rows(const float* p, const Stretch<T>* stretch, int n, int64_t at, int64_t dim, float* o) {
    for (; dim - at >= NB * LANES; at += NB * LANES)
        pv<RB, NB>(p, stretch, n, at, dim, o + at);
    if constexpr (NB > 1)
        if (at < dim) pv_rows<RB, NB / 2>(p, stretch, n, at, dim, o);
}

// call(first, constant number of rows) over groups of at most ROWS, as even as can be.
template <class Call>
FS_INLINE void grouped(int rows, Call call) {
    int groups = (rows + ROWS - 1) / ROWS;
    for (int i = 0; i < groups; i++) {
        int first = rows * i / groups;
        switch (rows * (i + 1) / groups - first) {
            case 1: call(first, std::integral_constant<int, 1>()); break;
            case 2: call(first, std::integral_constant<int, 2>()); break;
            case 3: call(first, std::integral_constant<int, 3>()); break;
            case 4: call(first, std::integral_constant<int, 4>()); break;
            case 5: call(first, std::integral_constant<int, 5>()); break;
            case 6: call(first, std::integral_constant<int, 6>()); break;
        }
    }
}

}  // namespace
}  // namespace fs
