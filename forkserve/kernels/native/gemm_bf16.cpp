#include "gemm_bf16.h"

#include <algorithm>

#include "amx.h"
#include "bf16.h"

namespace fs {
namespace {

constexpr int VECTORS = PANEL / LANES;
constexpr int BLOCK = PAIRED * PANEL;  // weights of a panel for a block of k

int64_t blocks_of(int64_t k) { return (k + PAIRED - 1) / PAIRED; }

// --- on vectors: x is [rows][k padded] floats ---------------------------------------------------

// Rows x vectors whose even and odd sums the registers hold.
#if defined(__AVX512F__)
constexpr int ROWS = 8, WIDE_ROWS = 4;
#else
constexpr int ROWS = 3, WIDE_ROWS = 1;  // beyond 1 row one vector of 16 outputs at a time
#endif

template <int R, int V, bool FETCH>
FS_INLINE void tile(const uint16_t* panel, const float* bias, int blocks, const float* x, float* y,
                    int64_t y_stride, int at, int valid, bool add) {
    const int64_t x_stride = int64_t(blocks) * PAIRED;
    vf total[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) total[r][v] = zero();
    for (int b = 0; b < blocks; b++, panel += BLOCK, x += PAIRED) {
        vf even[R][V], odd[R][V];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) even[r][v] = odd[r][v] = zero();
        for (int i = 0; i < PAIRED; i += 2) {
            Pairs weight[V];
            if (FETCH) fetch<4 * PANEL>(panel + i * PANEL);
            for (int v = 0; v < V; v++)
                weight[v] = load_pairs(panel + i * PANEL + 2 * (at + v * LANES));
            for (int r = 0; r < R; r++) {
                vf first = set1(x[r * x_stride + i]), second = set1(x[r * x_stride + i + 1]);
                for (int v = 0; v < V; v++) {
                    even[r][v] = fma(first, weight[v].even, even[r][v]);
                    odd[r][v] = fma(second, weight[v].odd, odd[r][v]);
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) total[r][v] = total[r][v] + (even[r][v] + odd[r][v]);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            int output = at + v * LANES;
            finish(y + r * y_stride + output, total[r][v], bias ? bias + output : nullptr,
                   valid - output, add);
        }
}

template <int R>
void rows_of_panel(const uint16_t* panel, const float* bias, int blocks, const float* x, float* y,
                   int64_t y_stride, int valid, bool add) {
    constexpr int V = R <= WIDE_ROWS ? VECTORS : 1;
    tile<R, V, true>(panel, bias, blocks, x, y, y_stride, 0, valid, add);
    for (int at = V * LANES; at < PANEL; at += V * LANES)
        tile<R, V, false>(panel, bias, blocks, x, y, y_stride, at, valid, add);
}

void by_vectors(const Packed& w, const float* x, int rows, int begin, int end, float* y,
                int64_t y_stride, bool add) {
    using Body = void (*)(const uint16_t*, const float*, int, const float*, float*, int64_t, int,
                          bool);
    static constexpr Body body[] = {
        nullptr,
        rows_of_panel<1>,
        rows_of_panel<2>,
        rows_of_panel<3>,
#if defined(__AVX512F__)
        rows_of_panel<4>,
        rows_of_panel<5>,
        rows_of_panel<6>,
        rows_of_panel<7>,
        rows_of_panel<8>,
#endif
    };
    const int blocks = (int)blocks_of(w.k);
    for (int p = begin; p < end; p++) {
        const uint16_t* panel = (const uint16_t*)w.data + p * int64_t(blocks) * BLOCK;
        const float* bias = w.bias ? w.bias + p * PANEL : nullptr;
        for (int row = 0, count; row < rows; row += count) {
            count = std::min(ROWS, rows - row);
            body[count](panel, bias, blocks, x + row * int64_t(blocks) * PAIRED,
                        y + row * y_stride + p * PANEL, y_stride, w.n - p * PANEL, add);
        }
    }
}

// x [k] to floats that are bfloat16, padded with zeros.
void round_row(const float* x, int k, float* out) {
    int i = 0;
    for (; i + LANES <= k; i += LANES) store(out + i, rounded(load(x + i)));
    for (const int end = (int)blocks_of(k) * PAIRED; i < end; i += LANES)
        store(out + i, rounded(load_part(x + i, std::max(0, k - i))));
}

// --- on tiles: x is [rows/16][k/32][16][32] bfloat16 --------------------------------------------

#if defined(__AMX_BF16__)

constexpr int TILED_ROWS = 4;  // fewer rows take less time on vectors
constexpr int X_TILE = TILE_ROWS * PAIRED;

// Sums [32 or 16][48] of two groups of 16 rows, or of one; rows of `out` are `stride` floats apart.
// cold: the first to read the panel.
template <bool TWO>
__attribute__((noinline)) void sums(const uint16_t* x, const uint16_t* panel, int blocks,
                                    float* out, int64_t stride, bool cold) {
    const uint16_t* second = x + int64_t(blocks) * X_TILE;
    constexpr int row = PANEL * 4;  // bytes of a row of pairs of weights
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    if (TWO) {
        _tile_zero(3);
        _tile_zero(4);
        _tile_zero(5);
    }
    for (int b = 0; b < blocks; b++, x += X_TILE, second += X_TILE, panel += BLOCK) {
        if (cold) fetch<2 * BLOCK>(panel);
        _tile_loadd(6, x, TILE_BYTES);
        _tile_loadd(7, panel, row);
        _tile_dpbf16ps(0, 6, 7);
        _tile_loadd(7, panel + 2 * LANES, row);
        _tile_dpbf16ps(1, 6, 7);
        _tile_loadd(7, panel + 4 * LANES, row);
        _tile_dpbf16ps(2, 6, 7);
        if (!TWO) continue;
        _tile_loadd(6, second, TILE_BYTES);
        _tile_dpbf16ps(5, 6, 7);
        _tile_loadd(7, panel + 2 * LANES, row);
        _tile_dpbf16ps(4, 6, 7);
        _tile_loadd(7, panel, row);
        _tile_dpbf16ps(3, 6, 7);
    }
    _tile_stored(0, out, stride * 4);
    _tile_stored(1, out + LANES, stride * 4);
    _tile_stored(2, out + 2 * LANES, stride * 4);
    if (!TWO) return;
    out += TILE_ROWS * stride;
    _tile_stored(3, out, stride * 4);
    _tile_stored(4, out + LANES, stride * 4);
    _tile_stored(5, out + 2 * LANES, stride * 4);
}

__attribute__((noinline)) void finish_rows(const float* sum, const float* bias, int rows, float* y,
                                           int64_t y_stride, int valid, bool add) {
    for (int r = 0; r < rows; r++)
        for (int at = 0; at < PANEL; at += LANES)
            finish(y + r * y_stride + at, load(sum + r * PANEL + at), bias ? bias + at : nullptr,
                   valid - at, add);
}

void by_tiles(const Packed& w, const uint16_t* x, int rows, int begin, int end, float* y,
              int64_t y_stride, bool add) {
    alignas(64) float sum[2 * TILE_ROWS * PANEL];
    const int blocks = (int)blocks_of(w.k);
    Tiles tiles;
    for (int p = begin; p < end; p++) {
        const uint16_t* panel = (const uint16_t*)w.data + p * int64_t(blocks) * BLOCK;
        const float* bias = w.bias ? w.bias + p * PANEL : nullptr;
        const int valid = w.n - p * PANEL;
        for (int row = 0; row < rows; row += 2 * TILE_ROWS) {
            const uint16_t* from = x + int64_t(row) * blocks * PAIRED;
            const int count = std::min(2 * TILE_ROWS, rows - row);
            float* to = y + row * y_stride + p * PANEL;
            const bool direct = !bias && !add && valid >= PANEL && count % TILE_ROWS == 0;
            auto body = count > TILE_ROWS ? sums<true> : sums<false>;
            if (direct) {
                body(from, panel, blocks, to, y_stride, row == 0);
            } else {
                body(from, panel, blocks, sum, PANEL, row == 0);
                finish_rows(sum, bias, count, to, y_stride, valid, add);
            }
        }
    }
}

// Row `row` of x to its place.  Rows behind the last one of a tile hold anything.
void tile_row(const float* x, int row, int k, uint16_t* out) {
    out += row / TILE_ROWS * blocks_of(k) * X_TILE + row % TILE_ROWS * PAIRED;
    for (int i = 0; i < k; i += PAIRED, out += X_TILE)
        for (int j = i; j < i + PAIRED; j += LANES) {
            bool whole = j + LANES <= k;
            store_bf16(out + j - i,
                       rounded(whole ? load(x + j) : load_part(x + j, std::max(0, k - j))));
        }
}

bool tiled(int64_t rows) { return rows >= TILED_ROWS; }

#else

constexpr int TILE_ROWS = 1;
void by_tiles(const Packed&, const uint16_t*, int, int, int, float*, int64_t, bool) {}
void tile_row(const float*, int, int, uint16_t*) {}
bool tiled(int64_t) { return false; }

#endif

}  // namespace

int64_t bf16_panel_bytes(int64_t k) { return blocks_of(k) * BLOCK * 2; }

void bf16_pack_panel(const float* w, int rows, int64_t k, uint16_t* data) {
    for (int64_t i = 0; i < k; i++)
        for (int r = 0; r < rows; r++)
            data[i / 2 * 2 * PANEL + 2 * r + i % 2] = to_bf16(w[r * k + i]);
}

void bf16_unpack(const uint16_t* panel, int64_t lane, int64_t k, float* out) {
    for (int64_t i = 0; i < k; i++) out[i] = from_bf16(panel[i / 2 * 2 * PANEL + 2 * lane + i % 2]);
}

int64_t bf16_ready_floats(int64_t rows, int64_t k) {
    int64_t padded = blocks_of(k) * PAIRED;
    if (!tiled(rows)) return rows * padded;
    return (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS * padded / 2;
}

void bf16_ready(const float* x, int rows, int begin, int end, int k, float* out) {
    for (int row = begin; row < end; row++) {
        const float* from = x + int64_t(row) * k;
        if (tiled(rows))
            tile_row(from, row, k, (uint16_t*)out);
        else
            round_row(from, k, out + row * blocks_of(k) * PAIRED);
    }
}

void bf16_linear(const Packed& w, const float* x, int rows, int begin, int end, float* y,
                 int64_t y_stride, bool add) {
    FlushDenormals flush;
    if (tiled(rows))
        by_tiles(w, (const uint16_t*)x, rows, begin, end, y, y_stride, add);
    else
        by_vectors(w, x, rows, begin, end, y, y_stride, add);
}

}  // namespace fs
