// The paired products of attention on tiles: the same bits as attention_tiles.h, for many vectors.
//
// Keys and values are put in pairs for a tile first: two dimensions of 16 keys, two positions of 16
// values.  All query vectors of a unit use them then.
#pragma once

#include "amx.h"

#if defined(__AMX_BF16__)

#include <algorithm>

#include "attention_tiles.h"

namespace fs {
namespace {

constexpr int SOON = 16;                        // positions whose values are fetched ahead
constexpr int VALUE_BLOCKS = 4;                 // of positions, whose values are put in pairs at once
constexpr int TILED_VECTORS = 6;                // fewer take less time on vectors
constexpr int WEIGHTS = SPLIT + PAIRED;         // bfloat16 from one row of weights to the next
constexpr int TILE_PAIRS = TILE_ROWS * PAIRED;  // elements of a tile of operands

// Where one group of 16 results stands, `stride` floats apart.  Of a group that is not whole the
// rows are elsewhere: those behind them belong to others.
struct Results {
    float* at;
    int64_t stride;
};

// Results [one or two groups of 16 vectors][one or two of 16 columns] = A B, or += with `more`.
// a: rows of vectors a_stride elements apart; b: tiles of each column, b_step elements apart.
template <bool TWO_A, bool TWO_B>
FS_NOINLINE void multiply_tiles(const uint16_t* a, int64_t a_stride, const uint16_t* b,
                                const uint16_t* next_b, int64_t b_step, int blocks, Results one,
                                Results two, bool more) {
    const int64_t row = a_stride * 2;
    const uint16_t* next_a = a + TILE_ROWS * a_stride;
    written();
    if (more) {
        _tile_loadd(0, one.at, one.stride * 4);
        if (TWO_B) _tile_loadd(1, one.at + LANES, one.stride * 4);
        if (TWO_A) _tile_loadd(2, two.at, two.stride * 4);
        if (TWO_A && TWO_B) _tile_loadd(3, two.at + LANES, two.stride * 4);
    } else {
        _tile_zero(0);
        if (TWO_B) _tile_zero(1);
        if (TWO_A) _tile_zero(2);
        if (TWO_A && TWO_B) _tile_zero(3);
    }
    for (int i = 0; i < blocks; i++, a += PAIRED, next_a += PAIRED, b += b_step, next_b += b_step) {
        _tile_loadd(4, a, row);
        _tile_loadd(6, b, TILE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        if (TWO_B) {
            _tile_loadd(7, next_b, TILE_BYTES);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (TWO_A) {
            _tile_loadd(5, next_a, row);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (TWO_A && TWO_B) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, one.at, one.stride * 4);
    if (TWO_B) _tile_stored(1, one.at + LANES, one.stride * 4);
    if (TWO_A) _tile_stored(2, two.at, two.stride * 4);
    if (TWO_A && TWO_B) _tile_stored(3, two.at + LANES, two.stride * 4);
}

// The same for n vectors, of which the last group may have fewer than 16, and two columns or one.
inline void multiply_vectors(const uint16_t* a, int64_t a_stride, int n, const uint16_t* b,
                             int64_t b_next, int columns, int64_t b_step, int blocks, float* c,
                             int64_t c_stride, bool more) {
    alignas(64) float rest[TILE_ROWS * 2 * LANES];
    const int width = columns * LANES;
    for (int vec = 0; vec < n; vec += 2 * TILE_ROWS) {
        const int rows = std::min(n - vec, 2 * TILE_ROWS), part = rows % TILE_ROWS;
        float* const to = c + vec * c_stride;
        float* const tail = to + (rows - part) * c_stride;
        Results one{to, c_stride}, two{to + TILE_ROWS * c_stride, c_stride};
        if (part) (rows < TILE_ROWS ? one : two) = {rest, 2 * LANES};
        for (int r = 0; r < part && more; r++)
            std::copy_n(tail + r * c_stride, width, rest + r * 2 * LANES);
        auto body = columns > 1 ? multiply_tiles<false, true> : multiply_tiles<false, false>;
        if (rows > TILE_ROWS)
            body = columns > 1 ? multiply_tiles<true, true> : multiply_tiles<true, false>;
        body(a + vec * a_stride, a_stride, b, b + b_next, b_step, blocks, one, two, more);
        for (int r = 0; r < part; r++)
            std::copy_n(rest + r * 2 * LANES, width, tail + r * c_stride);
    }
}

// 16 elements of two rows as pairs.
FS_INLINE void interleave(const uint16_t* a, const uint16_t* b, uint16_t* out) {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)a));
    __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)b));
    _mm512_store_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

inline int64_t padded(int64_t dim) { return (dim + PAIRED - 1) / PAIRED * PAIRED; }

// scores[vector][16 b + i] of n vectors, rounded q [n][padded dim], and `count` blocks of 16 keys.
// pairs: two tiles for every block of dimensions.
inline void tile_scores(const uint16_t* q, int n, const uint16_t* const* block, int count,
                        int64_t step, int64_t dim, uint16_t* pairs, float* scores) {
    const int64_t wide = padded(dim), each = wide * LANES;
    for (; count > 0; count -= 2, block += 2, scores += 2 * LANES) {
        const int columns = std::min(count, 2);
        for (int c = 0; c < columns; c++) {
            uint16_t* to = pairs + c * each;
            // The processor's own read-ahead stops where a page ends.
            const uint16_t* next = block[std::min(c + 2, count - 1)];
            for (int64_t d = 0; d < dim; d += 2) {
                __builtin_prefetch(next + d * step);
                __builtin_prefetch(next + (d + 1) * step);
                interleave(block[c] + d * step, block[c] + (d + 1) * step, to + d * LANES);
            }
            std::fill(to + dim * LANES, to + each, 0);
        }
        multiply_vectors(q, wide, n, pairs, each, columns, TILE_PAIRS, int(wide / PAIRED), scores,
                         SCORES, false);
    }
}

// o += weights * V of n vectors for blocks of 32 positions, some of them at a time, so that their
// pairs stay in L1.  row(i): the values of position i, or null where there is none.
template <class Row>
void tile_values(const uint16_t* weights, int n, int blocks, int64_t dim, Row row, uint16_t* pairs,
                 float* o) {
    alignas(64) static constexpr uint16_t none[256] = {};
    const int64_t step = dim * PAIRED;
    for (int first = 0; first < blocks; first += VALUE_BLOCKS) {
        const int last = std::min(first + VALUE_BLOCKS, blocks);
        uint16_t* to = pairs;
        for (int i = first * PAIRED; i < last * PAIRED; i += 2) {
            const uint16_t *a = row(i), *b = row(i + 1);
            for (int j = i + SOON; j < std::min(i + SOON + 2, blocks * PAIRED); j++)
                if (const uint16_t* soon = row(j))
                    for (int64_t d = 0; d < dim; d += TILE_BYTES / 2) __builtin_prefetch(soon + d);
            if (!a) a = none;
            if (!b) b = none;
            for (int64_t d = 0; d < dim; d += LANES)
                interleave(a + d, b + d, to + d * PAIRED + i % PAIRED * LANES);
            if (i % PAIRED == PAIRED - 2) to += step;
        }
        for (int64_t d = 0; d < dim; d += 2 * LANES)
            multiply_vectors(weights + first * PAIRED, WEIGHTS, n, pairs + d * PAIRED, TILE_PAIRS,
                             dim - d > LANES ? 2 : 1, step, last - first, o + d, WIDE, true);
    }
}

}  // namespace
}  // namespace fs

#endif
