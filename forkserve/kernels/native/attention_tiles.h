// The two products of attention in register tiles: scores of keys, and values weighted by them.
// `Paired` ones have the order of bf16.h, over dimensions and over absolute positions.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention.h"
#include "bf16.h"

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

// Paired products hold three sums for one.
constexpr int tile_of(bool paired) { return paired ? TILE / 3 : TILE; }
// Whether a product has steps long enough to fetch something on its way.
constexpr bool fetches(bool paired) { return tile_of(paired) > 2; }
constexpr int rows_of(bool paired) { return std::min(ROWS, tile_of(paired)); }
constexpr int widest(bool paired, int rows) {
    return rows * 4 <= tile_of(paired) ? 4 : rows * 2 <= tile_of(paired) ? 2 : 1;
}

FS_INLINE vf load_kv(const float* p) { return load(p); }
FS_INLINE vf load_kv(const uint16_t* p) { return load_bf16(p); }

// What a product fetches on its way, a line a step: a burst of them would fill the processor's queue
// of misses, and its multipliers would wait.
struct Soon {
    const char* at;
    int64_t step;  // bytes
    FS_INLINE void fetch() {
        __builtin_prefetch(at);
        at += step;
    }
};

// scores[r][16 b + i] = sum over d, in order, of q[r][d] * key i of block b.
template <int RB, int NB, class T>
FS_NOINLINE void qk(const float* q, const T* const* block, int64_t step, int64_t dim,
                    float* scores, Soon soon) {
    vf sum[RB][NB];
    const T* k[NB];
    FS_UNROLL for (int b = 0; b < NB; b++) k[b] = block[b];
    FS_UNROLL for (int r = 0; r < RB; r++)
        FS_UNROLL for (int b = 0; b < NB; b++) sum[r][b] = zero();
    for (int64_t d = 0; d < dim; d++) {
        soon.fetch();
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

// The same in pairs: q is rounded, denormal numbers are flushed.
template <int RB, int NB, class T>
FS_NOINLINE void qk_paired(const float* q, const T* const* block, int64_t step, int64_t dim,
                           float* scores, Soon soon) {
    vf total[RB][NB];
    const T* k[NB];
    FS_UNROLL for (int b = 0; b < NB; b++) k[b] = block[b];
    FS_UNROLL for (int r = 0; r < RB; r++)
        FS_UNROLL for (int b = 0; b < NB; b++) total[r][b] = zero();
    for (int64_t first = 0; first < dim; first += PAIRED) {
        vf even[RB][NB], odd[RB][NB];
        FS_UNROLL for (int r = 0; r < RB; r++)
            FS_UNROLL for (int b = 0; b < NB; b++) even[r][b] = odd[r][b] = zero();
        const int64_t end = std::min(first + PAIRED, dim);
        for (int64_t d = first; d < end; d += 2) {
            if constexpr (fetches(true)) {
                soon.fetch();
                soon.fetch();
            }
            vf x[NB], y[NB];
            FS_UNROLL for (int b = 0; b < NB; b++) {
                x[b] = load_kv(k[b]);
                y[b] = load_kv(k[b] + step);
                k[b] += 2 * step;
            }
            FS_UNROLL for (int r = 0; r < RB; r++) {
                vf one = set1(q[r * WIDE + d]), two = set1(q[r * WIDE + d + 1]);
                FS_UNROLL for (int b = 0; b < NB; b++) {
                    even[r][b] = fma(one, x[b], even[r][b]);
                    odd[r][b] = fma(two, y[b], odd[r][b]);
                }
            }
        }
        FS_UNROLL for (int r = 0; r < RB; r++)
            FS_UNROLL for (int b = 0; b < NB; b++)
                total[r][b] = total[r][b] + (even[r][b] + odd[r][b]);
    }
    FS_UNROLL for (int r = 0; r < RB; r++)
        FS_UNROLL for (int b = 0; b < NB; b++) store(scores + r * SCORES + b * LANES, total[r][b]);
}

template <bool P, int RB, int NB, class T>
void qk_rows(const float* q, const T* const* block, int n, int64_t step, int64_t dim,
             float* scores, Soon soon) {
    for (; n >= NB; n -= NB, block += NB, scores += NB * LANES) {
        if constexpr (P)
            qk_paired<RB, NB>(q, block, step, dim, scores, soon);
        else
            qk<RB, NB>(q, block, step, dim, scores, soon);
        soon = {reinterpret_cast<const char*>(q), 0};
    }
    if constexpr (NB > 1)
        if (n) qk_rows<P, RB, NB / 2>(q, block, n, step, dim, scores, soon);
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
                    float* o, Soon soon) {
    vf sum[RB][NB];
    FS_UNROLL for (int r = 0; r < RB; r++)
        FS_UNROLL for (int b = 0; b < NB; b++) sum[r][b] = load(o + r * WIDE + b * LANES);
    for (int i = 0; i < n; i++) {
        const T* v = stretch[i].v + at;
        for (int j = stretch[i].rows; j > 0; j--, p++, v += dim) {
            soon.fetch();
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

// The same in pairs.  o is [total, even, odd], `plane` floats apart: sums of a block of positions
// that an item leaves unfinished are there for the next one.  `position`: of the first row.
template <int RB, int NB, class T>
FS_NOINLINE void pv_paired(const float* p, const Stretch<T>* stretch, int n, int position,
                           int64_t at, int64_t dim, float* o, int64_t plane, Soon soon) {
    vf total[RB][NB], even[RB][NB], odd[RB][NB];
    FS_UNROLL for (int r = 0; r < RB; r++)
        FS_UNROLL for (int b = 0; b < NB; b++) {
            const float* from = o + r * WIDE + b * LANES;
            total[r][b] = load(from);
            even[r][b] = load(from + plane);
            odd[r][b] = load(from + 2 * plane);
        }
    auto add = [&](vf(&sum)[RB][NB], const T* v) {
        vf x[NB];
        FS_UNROLL for (int b = 0; b < NB; b++) x[b] = load_kv(v + b * LANES);
        FS_UNROLL for (int r = 0; r < RB; r++) {
            vf y = set1(p[r * SCORES]);
            FS_UNROLL for (int b = 0; b < NB; b++) sum[r][b] = fma(y, x[b], sum[r][b]);
        }
    };
    for (int i = 0; i < n; i++) {
        const T* v = stretch[i].v + at;
        for (int j = stretch[i].rows; j > 0; j--, p++, v += dim, position++) {
            if constexpr (fetches(true)) soon.fetch();
            if (position % PAIRED == 0)
                FS_UNROLL for (int r = 0; r < RB; r++)
                    FS_UNROLL for (int b = 0; b < NB; b++) {
                        total[r][b] = total[r][b] + (even[r][b] + odd[r][b]);
                        even[r][b] = odd[r][b] = zero();
                    }
            if (position % 2)
                add(odd, v);
            else
                add(even, v);
        }
    }
    FS_UNROLL for (int r = 0; r < RB; r++)
        FS_UNROLL for (int b = 0; b < NB; b++) {
            float* to = o + r * WIDE + b * LANES;
            store(to, total[r][b]);
            store(to + plane, even[r][b]);
            store(to + 2 * plane, odd[r][b]);
        }
}

// What pv_paired left unfinished joins the totals of n vectors.
inline void settle(float* o, int n, int64_t dim, int64_t plane) {
    for (int r = 0; r < n; r++, o += WIDE)
        for (int64_t d = 0; d < dim; d += LANES) {
            store(o + d, load(o + d) + (load(o + plane + d) + load(o + 2 * plane + d)));
            store(o + plane + d, zero());
            store(o + 2 * plane + d, zero());
        }
}

template <bool P, int RB, int NB, class T>
void pv_rows(const float* p, const Stretch<T>* stretch, int n, int position, int64_t at,
             int64_t dim, float* o, int64_t plane, Soon soon) {
    for (; dim - at >= NB * LANES; at += NB * LANES) {
        if constexpr (P)
            pv_paired<RB, NB>(p, stretch, n, position, at, dim, o + at, plane, soon);
        else
            pv<RB, NB>(p, stretch, n, at, dim, o + at, soon);
        soon = {reinterpret_cast<const char*>(p), 0};
    }
    if constexpr (NB > 1)
        if (at < dim) pv_rows<P, RB, NB / 2>(p, stretch, n, position, at, dim, o, plane, soon);
}

// call(first, constant number of rows) over groups of at most MOST, as even as can be.
template <int MOST, class Call>
FS_INLINE void grouped(int rows, Call call) {
    int groups = (rows + MOST - 1) / MOST;
    for (int i = 0; i < groups; i++) {
        int first = rows * i / groups;
        int count = rows * (i + 1) / groups - first;
        if (count == 1) call(first, std::integral_constant<int, 1>());
        if (count == 2) call(first, std::integral_constant<int, 2>());
        if constexpr (MOST > 2) {
            if (count == 3) call(first, std::integral_constant<int, 3>());
            if (count == 4) call(first, std::integral_constant<int, 4>());
            if (count == 5) call(first, std::integral_constant<int, 5>());
            if (count == 6) call(first, std::integral_constant<int, 6>());
        }
    }
}

}  // namespace
}  // namespace fs
