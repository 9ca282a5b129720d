// The paired products of attention on tiles: the same bits as attention_tiles.h, for many vectors.
//
// Keys and values are put in pairs for a tile first: two dimensions of 16 keys, two positions of 16
// values.  All query vectors of a unit use them then.  A tile that is loaded right after it was
// written waits until the writes have left the processor's queue, so one is multiplied while the
// next is made.
#pragma once

#include "amx.h"

#if defined(__AMX_BF16__)

#include <algorithm>

#include "attention_tiles.h"

namespace fs {
namespace {

constexpr int TILED_VECTORS = 6;                // fewer take less time on vectors
constexpr int WEIGHTS = SPLIT + PAIRED;         // bfloat16 from one row of weights to the next
constexpr int TILE_PAIRS = TILE_ROWS * PAIRED;  // elements of a tile of operands
constexpr int MOST_GROUPS = 3;                  // of two columns: six sums, and two tiles to multiply
constexpr int SOON = PAIRED;                    // positions whose values are fetched ahead

// n query vectors as groups of equally many rows, a group a tile.  The last one may begin within
// that before: rows of both are computed twice, with the same bits.
struct Groups {
    int count, rows, n;
    explicit Groups(int n)
        : count((n + TILE_ROWS - 1) / TILE_ROWS), rows((n + count - 1) / count), n(n) {}
    int start(int group) const { return std::min(group * rows, n - rows); }

    // Sums are the tiles from 0 on, 2 * group + column; vectors and pairs have one or two each.
    TileConfig shapes() const {
        TileConfig shapes = WHOLE_TILES;
        for (int tile = 0; tile < (count > 2 ? 7 : 6); tile++) shapes.rows[tile] = uint8_t(rows);
        return shapes;
    }
};

// Where the groups of an operand or a result begin; rows are `stride` bytes apart.
template <class T>
struct Grouped {
    T* at[MOST_GROUPS];
    int64_t stride;

    Grouped(T* first, int64_t step, const Groups& groups) : stride(step * int64_t(sizeof(T))) {
        for (int g = 0; g < MOST_GROUPS; g++) at[g] = first + groups.start(g) * step;
    }
};

template <int G, bool TWO>
FS_INLINE void clear_sums() {
    _tile_zero(0);
    if (TWO) _tile_zero(1);
    if (G > 1) _tile_zero(2);
    if (G > 1 && TWO) _tile_zero(3);
    if (G > 2) _tile_zero(4);
    if (G > 2 && TWO) _tile_zero(5);
}

template <int G, bool TWO>
FS_INLINE void load_sums(const Grouped<float>& c) {
    _tile_loadd(0, c.at[0], c.stride);
    if (TWO) _tile_loadd(1, c.at[0] + LANES, c.stride);
    if (G > 1) _tile_loadd(2, c.at[1], c.stride);
    if (G > 1 && TWO) _tile_loadd(3, c.at[1] + LANES, c.stride);
    if (G > 2) _tile_loadd(4, c.at[2], c.stride);
    if (G > 2 && TWO) _tile_loadd(5, c.at[2] + LANES, c.stride);
}

template <int G, bool TWO>
FS_INLINE void store_sums(const Grouped<float>& c) {
    _tile_stored(0, c.at[0], c.stride);
    if (TWO) _tile_stored(1, c.at[0] + LANES, c.stride);
    if (G > 1) _tile_stored(2, c.at[1], c.stride);
    if (G > 1 && TWO) _tile_stored(3, c.at[1] + LANES, c.stride);
    if (G > 2) _tile_stored(4, c.at[2], c.stride);
    if (G > 2 && TWO) _tile_stored(5, c.at[2] + LANES, c.stride);
}

// Sums += 32 inputs of the vectors, from `first` on, times those of one or two columns of 16.
template <int G, bool TWO>
FS_INLINE void multiply_block(const Grouped<const uint16_t>& a, int64_t first, const uint16_t* b,
                              const uint16_t* next_b) {
    if (G < 3) {
        _tile_loadd(6, b, TILE_BYTES);
        _tile_loadd(4, a.at[0] + first, a.stride);
        _tile_dpbf16ps(0, 4, 6);
        if (G > 1) _tile_loadd(5, a.at[1] + first, a.stride);
        if (G > 1) _tile_dpbf16ps(2, 5, 6);
        if (TWO) _tile_loadd(7, next_b, TILE_BYTES);
        if (TWO) _tile_dpbf16ps(1, 4, 7);
        if (G > 1 && TWO) _tile_dpbf16ps(3, 5, 7);
        return;
    }
    _tile_loadd(7, b, TILE_BYTES);
    _tile_loadd(6, a.at[0] + first, a.stride);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(6, a.at[1] + first, a.stride);
    _tile_dpbf16ps(2, 6, 7);
    _tile_loadd(6, a.at[2] + first, a.stride);
    _tile_dpbf16ps(4, 6, 7);
    if (!TWO) return;
    _tile_loadd(7, next_b, TILE_BYTES);
    _tile_dpbf16ps(5, 6, 7);
    _tile_loadd(6, a.at[1] + first, a.stride);
    _tile_dpbf16ps(3, 6, 7);
    _tile_loadd(6, a.at[0] + first, a.stride);
    _tile_dpbf16ps(1, 6, 7);
}

// call(constant number of groups) for n vectors.
template <class Call>
FS_INLINE void by_groups(int n, Call call) {
    for (int first = 0; first < n; first += MOST_GROUPS * TILE_ROWS) {
        const Groups groups(std::min(n - first, MOST_GROUPS * TILE_ROWS));
        const TileConfig shapes = groups.shapes();
        Tiles tiles(shapes);
        if (groups.count == 1) call(first, groups, std::integral_constant<int, 1>());
        if (groups.count == 2) call(first, groups, std::integral_constant<int, 2>());
        if (groups.count == 3) call(first, groups, std::integral_constant<int, 3>());
    }
}

// 16 elements of two rows as pairs.
FS_INLINE void interleave(const uint16_t* a, const uint16_t* b, uint16_t* out) {
    alignas(64) static constexpr uint16_t order[32] = {
        0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)a));
    both = _mm512_inserti64x4(both, _mm256_loadu_si256((const __m256i*)b), 1);
    _mm512_store_si512(out, _mm512_permutexvar_epi16(_mm512_load_si512(order), both));
}

inline int64_t padded(int64_t dim) { return (dim + PAIRED - 1) / PAIRED * PAIRED; }

// Keys of up to two blocks of 16, whose rows are `step` apart, in pairs; `next` are fetched.
inline void pair_keys(const uint16_t* const* block, int columns, const uint16_t* const* next,
                      int64_t step, int64_t dim, uint16_t* pairs) {
    const int64_t each = padded(dim) * LANES;
    for (int c = 0; c < columns; c++) {
        uint16_t* to = pairs + c * each;
        // The processor's own read-ahead stops where a page ends.
        for (int64_t d = 0; d < dim; d += 2) {
            __builtin_prefetch(next[c] + d * step);
            if (step > LANES) __builtin_prefetch(next[c] + (d + 1) * step);
            interleave(block[c] + d * step, block[c] + (d + 1) * step, to + d * LANES);
        }
        std::fill(to + dim * LANES, to + each, 0);
    }
}

// pairs: twice two columns of `padded(dim)` inputs.
template <int G>
FS_NOINLINE void group_scores(const uint16_t* q, const Groups& groups, const uint16_t* const* block,
                              int count, int64_t step, int64_t dim, uint16_t* pairs,
                              float* scores) {
    const int64_t wide = padded(dim), each = wide * LANES;
    const Grouped<const uint16_t> a(q, wide, groups);
    auto multiply = [&](int first) {
        const uint16_t* b = pairs + first / 2 % 2 * 2 * each;
        const Grouped<float> c(scores + first * LANES, SCORES, groups);
        if (first + 1 < count) {
            clear_sums<G, true>();
            for (int64_t d = 0; d < wide; d += PAIRED)
                multiply_block<G, true>(a, d, b + d * LANES, b + each + d * LANES);
            store_sums<G, true>(c);
        } else {
            clear_sums<G, false>();
            for (int64_t d = 0; d < wide; d += PAIRED)
                multiply_block<G, false>(a, d, b + d * LANES, nullptr);
            store_sums<G, false>(c);
        }
    };
    for (int first = 0; first < count; first += 2) {
        const uint16_t* next[] = {block[std::min(first + 2, count - 1)],
                                  block[std::min(first + 3, count - 1)]};
        pair_keys(block + first, std::min(count - first, 2), next, step, dim,
                  pairs + first / 2 % 2 * 2 * each);
        written();
        if (first) multiply(first - 2);
    }
    multiply((count - 1) / 2 * 2);
}

// scores[vector][16 b + i] of n vectors, rounded q [n][padded dim], and `count` blocks of 16 keys.
inline void tile_scores(const uint16_t* q, int n, const uint16_t* const* block, int count,
                        int64_t step, int64_t dim, uint16_t* pairs, float* scores) {
    if (count)
        by_groups(n, [&](int first, const Groups& groups, auto g) {
            group_scores<g()>(q + first * padded(dim), groups, block, count, step, dim, pairs,
                              scores + first * SCORES);
        });
}

// o += weights * V for 32 or 16 columns, whose pairs are made from `row` on, of blocks of 32
// positions.  pairs: twice two tiles.
template <int G, bool TWO>
FS_NOINLINE void group_values(const uint16_t* weights, const Groups& groups,
                              const uint16_t* const* row, int64_t at, int blocks, uint16_t* pairs,
                              float* o) {
    const Grouped<const uint16_t> a(weights, WEIGHTS, groups);
    const Grouped<float> c(o, WIDE, groups);
    written();
    load_sums<G, TWO>(c);
    auto multiply = [&](int i) {
        const uint16_t* b = pairs + i % 2 * 2 * TILE_PAIRS;
        multiply_block<G, TWO>(a, i * PAIRED, b, b + TILE_PAIRS);
    };
    for (int i = 0; i < blocks; i++) {
        uint16_t* to = pairs + i % 2 * 2 * TILE_PAIRS;
        for (int j = 0; j < PAIRED; j += 2, row += 2, to += PAIRED) {
            __builtin_prefetch(row[SOON] + at);
            __builtin_prefetch(row[SOON + 1] + at);
            interleave(row[0] + at, row[1] + at, to);
            if (TWO) interleave(row[0] + at + LANES, row[1] + at + LANES, to + TILE_PAIRS);
        }
        written();
        if (i) multiply(i - 1);
    }
    multiply(blocks - 1);
    store_sums<G, TWO>(c);
}

// o += weights * V of n vectors for blocks of 32 positions.  row: [32 blocks + SOON] their values.
inline void tile_values(const uint16_t* weights, int n, int blocks, int64_t dim,
                        const uint16_t* const* row, uint16_t* pairs, float* o) {
    by_groups(n, [&](int first, const Groups& groups, auto g) {
        const uint16_t* from = weights + first * WEIGHTS;
        float* to = o + first * WIDE;
        int64_t d = 0;
        for (; d + LANES < dim; d += 2 * LANES)
            group_values<g(), true>(from, groups, row, d, blocks, pairs, to + d);
        if (d < dim) group_values<g(), false>(from, groups, row, d, blocks, pairs, to + d);
    });
}

}  // namespace
}  // namespace fs

#endif
