#include "gemm_w8a16.h"

#include <algorithm>

#include "amx.h"
#include "bf16.h"
#include "i16.h"

namespace fs {
namespace {

constexpr int GROUP = 32;  // inputs that share a scale
constexpr float MOST = 32639;  // 127 * 256 + 127: of an input as an integer
constexpr int VECTORS = PANEL / LANES;
constexpr int TILE = GROUP * LANES;   // weights of 16 outputs in a group
constexpr int BLOCK = GROUP * PANEL;  // and of a panel

int64_t groups_of(int64_t k) { return (k + GROUP - 1) / GROUP; }
int64_t scale_bytes(int64_t groups) { return (groups * PANEL * 2 + 63) / 64 * 64; }

struct Panel {
    const uint16_t* scales;
    const int8_t* codes;
    const float* bias;
    int valid;  // outputs

    Panel(const Packed& w, int number, int64_t groups)
        : scales((const uint16_t*)((const char*)w.data + number * w8a16_panel_bytes(w.k))),
          codes((const int8_t*)scales + scale_bytes(groups)),
          bias(w.bias ? w.bias + number * PANEL : nullptr),
          valid(w.n - number * PANEL) {}
};

// Sums of a group join the total.
FS_INLINE vf join(vf total, vf sum, vf x_scale, const uint16_t* w_scale) {
    return fma(sum * x_scale, load_bf16(w_scale), total);
}

// A group's scale, and its inverse by which inputs become whole numbers of two signed bytes.  What
// is too small for an inverse is 0; the scale of a NaN or an infinity is a NaN.
FS_INLINE void scales_of(const vf (&x)[GROUP / LANES], float* scale, float* inverse) {
    vf peak = abs(x[0]), faults = zero() * x[0];
    for (int i = 1; i < GROUP / LANES; i++) {
        peak = max(peak, abs(x[i]));
        faults = fma(zero(), x[i], faults);
    }
    const float top = reduce_max(peak), one = top / MOST;
    const bool some = top > 1e-30f;
    *scale = (some ? one : 0.0f) + reduce_add(faults);
    *inverse = some ? MOST / top : 0.0f;
}

FS_INLINE void load_group(const float* x, int k, int first, vf (&out)[GROUP / LANES]) {
    for (int i = 0; i < GROUP / LANES; i++, first += LANES)
        out[i] = first + LANES <= k ? load(x + first)
                                    : load_part(x + first, std::max(0, k - first));
}

// --- on vectors: x is [rows][k padded] integers, then [rows][k/32] scales -------------------------

// Rows x vectors whose sums the registers hold.
#if defined(__AVX512F__)
constexpr int ROWS = 8, WIDE_ROWS = 3;
#else
constexpr int ROWS = 2, WIDE_ROWS = 0;  // one vector of 16 outputs at a time
#endif

template <int R, int V, bool FETCH>
FS_INLINE void tile(const Panel& panel, int groups, const int16_t* x, const float* x_scales,
                    float* y, int64_t y_stride, int first, bool add) {
    const int64_t stride = int64_t(groups) * GROUP;
    const int8_t* codes = panel.codes + first * TILE;
    vf total[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) total[r][v] = zero();
    for (int g = 0; g < groups; g++, codes += BLOCK, x += GROUP) {
        Sums sum[R][V];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sum[r][v] = no_sums();
        for (int i = 0; i < GROUP; i += QUAD) {
            if (FETCH) fetch<QUAD * PANEL>(codes - first * TILE + i * PANEL);
            Inputs input[R];
            for (int r = 0; r < R; r++) input[r] = four(x + r * stride + i);
            for (int v = 0; v < V; v++) {
                Weights weights = widen(codes + v * TILE + i * LANES);
                for (int r = 0; r < R; r++) sum[r][v] = dot(sum[r][v], weights, input[r]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++)
                total[r][v] = join(total[r][v], to_float(sum[r][v]), set1(x_scales[r * groups + g]),
                                   panel.scales + g * PANEL + (first + v) * LANES);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            const int at = (first + v) * LANES;
            finish(y + r * y_stride + at, total[r][v], panel.bias ? panel.bias + at : nullptr,
                   panel.valid - at, add);
        }
}

template <int R>
void rows_of_panel(const Panel& panel, int groups, const int16_t* x, const float* x_scales,
                   float* y, int64_t y_stride, bool add) {
    constexpr int V = R <= WIDE_ROWS ? VECTORS : 1;
    tile<R, V, true>(panel, groups, x, x_scales, y, y_stride, 0, add);
    for (int v = V; v < VECTORS; v += V)
        tile<R, V, false>(panel, groups, x, x_scales, y, y_stride, v, add);
}

void by_vectors(const Packed& w, const float* ready, int rows, int begin, int end, float* y,
                int64_t y_stride, bool add) {
    using Body = void (*)(const Panel&, int, const int16_t*, const float*, float*, int64_t, bool);
    static constexpr Body body[] = {
        nullptr,
        rows_of_panel<1>,
        rows_of_panel<2>,
#if defined(__AVX512F__)
        rows_of_panel<3>,
        rows_of_panel<4>,
        rows_of_panel<5>,
        rows_of_panel<6>,
        rows_of_panel<7>,
        rows_of_panel<8>,
#endif
    };
    const int groups = (int)groups_of(w.k);
    const int16_t* x = (const int16_t*)ready;
    const float* x_scales = (const float*)(x + int64_t(rows) * groups * GROUP);
    for (int p = begin; p < end; p++) {
        const Panel panel(w, p, groups);
        for (int row = 0, count; row < rows; row += count) {
            count = std::min(ROWS, rows - row);
            body[count](panel, groups, x + int64_t(row) * groups * GROUP, x_scales + row * groups,
                        y + row * y_stride + p * PANEL, y_stride, add);
        }
    }
}

void round_row(const float* x, int row, int rows, int k, float* ready) {
    const int groups = (int)groups_of(k);
    int16_t* out = (int16_t*)ready + int64_t(row) * groups * GROUP;
    float* scales = (float*)((int16_t*)ready + int64_t(rows) * groups * GROUP) + row * groups;
    for (int g = 0; g < groups; g++, out += GROUP) {
        vf some[GROUP / LANES];
        float inverse;
        load_group(x, k, g * GROUP, some);
        scales_of(some, scales + g, &inverse);
        for (int i = 0; i < GROUP / LANES; i++)
            store_i16(out + i * LANES, round(some[i] * set1(inverse)));
    }
}

// --- on tiles: x is [rows/16][k/32] groups: [16] scales, the high and the low bytes [rows][32] ---

#if defined(__AMX_INT8__)

constexpr int TILED_ROWS = 4;   // fewer rows take less time on vectors
constexpr int NARROW_ROWS = 8;  // up to which high and low bytes of all rows are one tile

constexpr int X_GROUP = TILE_ROWS * 4 + 2 * TILE_ROWS * GROUP;  // bytes of 16 rows

// Rows that are done together, of so many.
int height_of(int64_t rows) { return (int)std::min<int64_t>(rows, TILE_ROWS); }

// What tiles hold, by the height of a group.
struct Shapes {
    TileConfig of[TILE_ROWS + 1];
};
constexpr Shapes shapes() {
    Shapes all{};
    for (int rows = 1; rows <= TILE_ROWS; rows++) {
        const bool narrow = rows <= NARROW_ROWS;
        const int sums = narrow ? 3 : 4, weights = 6;  // then inputs
        TileConfig& one = all.of[rows];
        one.palette = 1;
        for (int i = 0; i < 8; i++) {
            one.bytes[i] = i < weights ? TILE_BYTES : GROUP;
            one.rows[i] = uint8_t(i >= sums && i < weights ? GROUP / QUAD : narrow ? 2 * rows : rows);
        }
    }
    return all;
}
constexpr Shapes SHAPES = shapes();

// Sums of the high and of the low bytes of `height` rows, for 48 outputs of a group.
using GroupSums = int32_t[VECTORS][2 * TILE_ROWS * LANES];

// cold: the first to read the weights.
template <bool COLD>
FS_INLINE void multiply_narrow(const int8_t* codes, const char* x, GroupSums& sums) {
    _tile_loadd(6, x, GROUP);
    if (COLD) fetch<TILE>(codes);
    _tile_loadd(3, codes, TILE_BYTES);
    _tile_zero(0);
    _tile_dpbssd(0, 6, 3);
    if (COLD) fetch<TILE>(codes + TILE);
    _tile_loadd(4, codes + TILE, TILE_BYTES);
    _tile_zero(1);
    _tile_dpbssd(1, 6, 4);
    if (COLD) fetch<TILE>(codes + 2 * TILE);
    _tile_loadd(5, codes + 2 * TILE, TILE_BYTES);
    _tile_zero(2);
    _tile_dpbssd(2, 6, 5);
    _tile_stored(0, sums[0], TILE_BYTES);
    _tile_stored(1, sums[1], TILE_BYTES);
    _tile_stored(2, sums[2], TILE_BYTES);
}

// Tiles are named by literals.
#define FS_MULTIPLY(HIGH, LOW, WEIGHTS, codes, sums, height)   \
    if (COLD) fetch<TILE>(codes);                              \
    _tile_loadd(WEIGHTS, codes, TILE_BYTES);                   \
    _tile_zero(HIGH);                                          \
    _tile_dpbssd(HIGH, 6, WEIGHTS);                            \
    _tile_zero(LOW);                                           \
    _tile_dpbssd(LOW, 7, WEIGHTS);                             \
    _tile_stored(HIGH, sums, TILE_BYTES);                      \
    _tile_stored(LOW, sums + height * LANES, TILE_BYTES)

template <bool COLD>
FS_INLINE void multiply_wide(const int8_t* codes, const char* x, int height, GroupSums& sums) {
    _tile_loadd(6, x, GROUP);
    _tile_loadd(7, x + height * GROUP, GROUP);
    FS_MULTIPLY(0, 1, 4, codes, sums[0], height);
    FS_MULTIPLY(2, 3, 5, codes + TILE, sums[1], height);
    FS_MULTIPLY(0, 1, 4, codes + 2 * TILE, sums[2], height);
}

FS_INLINE void join_rows(const int32_t* sums, int height, const float* x_scales,
                         const uint16_t* w_scales, float* total) {
    const vf w_scale = load_bf16(w_scales);
    const int32_t* lows = sums + height * LANES;
    _Pragma("GCC unroll 4") for (int r = 0; r < height; r++) {
        __m512i high = _mm512_load_si512(sums + r * LANES), low = _mm512_load_si512(lows + r * LANES);
        vf sum{_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low))};
        store(total + r * PANEL, fma(sum * set1(x_scales[r]), w_scale, load(total + r * PANEL)));
    }
}

// Totals [height][48] of a group of rows.
template <bool COLD>
__attribute__((noinline)) void totals(const Panel& panel, int groups, const char* x, int height,
                                      float* total) {
    alignas(64) GroupSums sums;
    std::fill(total, total + height * PANEL, 0.0f);
    const int8_t* codes = panel.codes;
    const uint16_t* scales = panel.scales;
    for (int g = 0; g < groups; g++, codes += BLOCK, scales += PANEL, x += X_GROUP) {
        const float* x_scales = (const float*)x;
        const char* bytes = x + TILE_ROWS * 4;
        if (height <= NARROW_ROWS)
            multiply_narrow<COLD>(codes, bytes, sums);
        else
            multiply_wide<COLD>(codes, bytes, height, sums);
        for (int v = 0; v < VECTORS; v++)
            join_rows(sums[v], height, x_scales, scales + v * LANES, total + v * LANES);
    }
}

void by_tiles(const Packed& w, const float* ready, int rows, int begin, int end, float* y,
              int64_t y_stride, bool add) {
    alignas(64) float total[TILE_ROWS * PANEL];
    const int groups = (int)groups_of(w.k), height = height_of(rows);
    Tiles tiles(SHAPES.of[height]);
    for (int p = begin; p < end; p++) {
        const Panel panel(w, p, groups);
        for (int row = 0; row < rows; row += TILE_ROWS) {
            const char* x = (const char*)ready + int64_t(row) / TILE_ROWS * groups * X_GROUP;
            auto body = row == 0 ? totals<true> : totals<false>;
            body(panel, groups, x, height, total);
            for (int r = 0; r < std::min(height, rows - row); r++)
                for (int at = 0; at < PANEL; at += LANES)
                    finish(y + (row + r) * y_stride + p * PANEL + at, load(total + r * PANEL + at),
                           panel.bias ? panel.bias + at : nullptr, panel.valid - at, add);
        }
    }
}

// Row `row` of x to its place.  Rows behind the last one of a tile hold anything.
void tile_row(const float* x, int row, int rows, int k, float* ready) {
    const int groups = (int)groups_of(k), within = row % TILE_ROWS;
    const int to_low = height_of(rows) * GROUP;
    char* out = (char*)ready + int64_t(row) / TILE_ROWS * groups * X_GROUP;
    for (int g = 0; g < groups; g++, out += X_GROUP) {
        vf some[GROUP / LANES];
        float inverse;
        load_group(x, k, g * GROUP, some);
        scales_of(some, (float*)out + within, &inverse);
        char* bytes = out + TILE_ROWS * 4 + within * GROUP;
        for (int i = 0; i < GROUP / LANES; i++, bytes += LANES) {
            __m512i whole = _mm512_cvtps_epi32((some[i] * set1(inverse)).a);
            __m512i up = _mm512_add_epi32(whole, _mm512_set1_epi32(128));  // low bytes are signed
            __m128i high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(up, 8));
            _mm_store_si128((__m128i*)bytes, high);
            _mm_store_si128((__m128i*)(bytes + to_low), _mm512_cvtepi32_epi8(whole));
        }
    }
}

bool tiled(int64_t rows) { return rows >= TILED_ROWS; }

#else

constexpr int TILE_ROWS = 1, X_GROUP = 0;
void by_tiles(const Packed&, const float*, int, int, int, float*, int64_t, bool) {}
void tile_row(const float*, int, int, int, float*) {}
bool tiled(int64_t) { return false; }

#endif

// One group of one output: integers round(w / scale) in -127..127, scale = max |w| / 127 rounded
// to bfloat16 first.
void pack_group(const float* w, int count, int lane, uint16_t* scales, int8_t* codes) {
    float top = 0.0f;
    for (int i = 0; i < count; i++) top = std::max(top, __builtin_fabsf(w[i]));
    scales[lane] = to_bf16(top / 127.0f);
    const float scale = from_bf16(scales[lane]);
    const float inverse = scale >= __FLT_MIN__ ? 1.0f / scale : 0.0f;  // finite
    codes += lane / LANES * TILE + lane % LANES * QUAD;
    for (int i = 0; i < count; i++) {
        float value = __builtin_rintf(w[i] * inverse);
        codes[i / QUAD * QUAD * LANES + i % QUAD] =
            (int8_t)std::min(std::max(value, -127.0f), 127.0f);
    }
}

}  // namespace

int64_t w8a16_panel_bytes(int64_t k) {
    return scale_bytes(groups_of(k)) + groups_of(k) * BLOCK;
}

void w8a16_pack_panel(const float* w, int rows, int64_t k, void* data) {
    const int64_t groups = groups_of(k);
    uint16_t* scales = (uint16_t*)data;
    int8_t* codes = (int8_t*)data + scale_bytes(groups);
    for (int r = 0; r < rows; r++)
        for (int64_t g = 0; g < groups; g++)
            pack_group(w + r * k + g * GROUP, (int)std::min<int64_t>(GROUP, k - g * GROUP), r,
                       scales + g * PANEL, codes + g * BLOCK);
}

void w8a16_unpack(const void* panel, int64_t lane, int64_t k, float* out) {
    const uint16_t* scales = (const uint16_t*)panel + lane;
    const int8_t* codes = (const int8_t*)panel + scale_bytes(groups_of(k)) + lane / LANES * TILE +
                          lane % LANES * QUAD;
    for (int64_t i = 0; i < k; i++) {
        const int64_t g = i / GROUP, within = i % GROUP;
        const int8_t code = codes[g * BLOCK + within / QUAD * QUAD * LANES + within % QUAD];
        out[i] = (float)code * from_bf16(scales[g * PANEL]);
    }
}

int64_t w8a16_ready_floats(int64_t rows, int64_t k) {
    if (tiled(rows)) return (rows + TILE_ROWS - 1) / TILE_ROWS * groups_of(k) * (X_GROUP / 4);
    return rows * groups_of(k) * (GROUP / 2 + 1);
}

void w8a16_ready(const float* x, int rows, int begin, int end, int k, float* out) {
    for (int row = begin; row < end; row++) {
        if (tiled(rows))
            tile_row(x + int64_t(row) * k, row, rows, k, out);
        else
            round_row(x + int64_t(row) * k, row, rows, k, out);
    }
}

void w8a16_linear(const Packed& w, const float* x, int rows, int begin, int end, float* y,
                  int64_t y_stride, bool add) {
    if (tiled(rows))
        by_tiles(w, x, rows, begin, end, y, y_stride, add);
    else
        by_vectors(w, x, rows, begin, end, y, y_stride, add);
}

}  // namespace fs
