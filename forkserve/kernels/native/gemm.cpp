#include "gemm.h"

#include <algorithm>
#include <vector>

#include "threads.h"

namespace fs {
namespace {

constexpr int VECTORS = PANEL / LANES;
// A sum over k is one of sums over blocks: half the rounding error, and a fixed order all the same.
constexpr int K_BLOCK = 192;

// Rows x vectors of accumulators: as many as the registers hold.
#if defined(__AVX512F__)
constexpr int ROWS = 8, WIDE_ROWS = 8;
#else
constexpr int ROWS = 6, WIDE_ROWS = 2;  // beyond 2 rows one vector of 16 outputs at a time
#endif

FS_INLINE vf load_weight(const float* p) { return load(p); }
FS_INLINE vf load_weight(const uint16_t* p) { return load_bf16(p); }

FS_INLINE void finish(float* y, vf sum, const float* bias, int valid, bool add) {
    if (bias) sum = sum + load(bias);
    if (valid >= LANES) {
        store(y, add ? load(y) + sum : sum);
    } else if (valid > 0) {
        store_part(y, add ? load_part(y, valid) + sum : sum, valid);
    }
}

// R rows by V vectors of one panel.
template <int R, int V, class Weight>
FS_INLINE void tile(const Weight* w, const float* bias, int k, const float* x, int64_t x_stride,
                    float* y, int64_t y_stride, int valid, bool add) {
    vf total[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) total[r][v] = zero();
    for (int first = 0; first < k; first += K_BLOCK) {
        vf sum[R][V];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sum[r][v] = zero();
        int last = std::min(first + K_BLOCK, k);
        for (int i = first; i < last; i++) {
            vf weight[V];
            for (int v = 0; v < V; v++) weight[v] = load_weight(w + (int64_t)i * PANEL + v * LANES);
            for (int r = 0; r < R; r++) {
                vf value = set1(x[r * x_stride + i]);
                for (int v = 0; v < V; v++) sum[r][v] = fma(value, weight[v], sum[r][v]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) total[r][v] = total[r][v] + sum[r][v];
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++)
            finish(y + r * y_stride + v * LANES, total[r][v], bias ? bias + v * LANES : nullptr,
                   valid - v * LANES, add);
}

template <int R, class Weight>
void panel(const Weight* w, const float* bias, int k, const float* x, int64_t x_stride, float* y,
           int64_t y_stride, int valid, bool add) {
    if constexpr (R <= WIDE_ROWS) {
        tile<R, VECTORS>(w, bias, k, x, x_stride, y, y_stride, valid, add);
    } else {
        for (int v = 0; v < VECTORS; v++)
            tile<R, 1>(w + v * LANES, bias ? bias + v * LANES : nullptr, k, x, x_stride,
                       y + v * LANES, y_stride, valid - v * LANES, add);
    }
}

template <class Weight>
void floats(const Packed& w, const Rows& rows, int begin, int end, float* y, int64_t y_stride,
            bool add) {
    using Panel = void (*)(const Weight*, const float*, int, const float*, int64_t, float*,
                           int64_t, int, bool);
    static const Panel by_rows[] = {
        nullptr,          panel<1, Weight>, panel<2, Weight>, panel<3, Weight>, panel<4, Weight>,
        panel<5, Weight>, panel<6, Weight>,
#if defined(__AVX512F__)
        panel<7, Weight>, panel<8, Weight>,
#endif
    };
    for (int p = begin; p < end; p++) {
        const Weight* data = (const Weight*)w.data + (int64_t)p * w.k * PANEL;
        const float* bias = w.bias ? w.bias + p * PANEL : nullptr;
        int valid = std::min(PANEL, w.n - p * PANEL);
        for (int row = 0; row < rows.count;) {
            int count = std::min(ROWS, rows.count - row);
            by_rows[count](data, bias, w.k, rows.x + row * rows.stride, rows.stride,
                           y + row * y_stride + p * PANEL, y_stride, valid, add);
            row += count;
        }
    }
}

// Integer sums of R rows over one panel; exact, so their order does not matter.
#if defined(__AVX512VNNI__)

constexpr int I8_ROWS = 8;
constexpr bool OFFSET = true;  // the sums are of (integer + 128) * weight

template <int R>
FS_INLINE void sum_i8(const int8_t* w, int quads, const uint8_t* q, int64_t q_stride,
                      int32_t (*out)[PANEL]) {
    __m512i sum[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] = _mm512_setzero_si512();
    for (int i = 0; i < quads; i++) {
        __m512i weight[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            weight[v] = _mm512_loadu_si512(w + ((int64_t)i * PANEL + v * LANES) * 4);
        for (int r = 0; r < R; r++) {
            int32_t four;
            std::memcpy(&four, q + r * q_stride + 4 * i, 4);
            __m512i value = _mm512_set1_epi32(four);
            for (int v = 0; v < VECTORS; v++)
                sum[r][v] = _mm512_dpbusd_epi32(sum[r][v], value, weight[v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) _mm512_storeu_si512(out[r] + v * LANES, sum[r][v]);
}

#elif defined(__AVX2__)

constexpr int I8_ROWS = 3;
constexpr bool OFFSET = true;

template <int R>
FS_INLINE void sum_i8(const int8_t* w, int quads, const uint8_t* q, int64_t q_stride,
                      int32_t (*out)[PANEL]) {
    for (int v = 0; v < VECTORS; v++) {
        __m256i sum[R][4];  // each of 4 outputs, two halves an output
        for (int r = 0; r < R; r++)
            for (int j = 0; j < 4; j++) sum[r][j] = _mm256_setzero_si256();
        for (int i = 0; i < quads; i++) {
            const int8_t* p = w + ((int64_t)i * PANEL + v * LANES) * 4;
            __m256i value[R];
            for (int r = 0; r < R; r++) {
                int32_t four;
                std::memcpy(&four, q + r * q_stride + 4 * i, 4);
                value[r] = _mm256_cvtepu8_epi16(_mm_set1_epi32(four));
            }
            for (int j = 0; j < 4; j++) {
                // Through 16 bits: the 8-bit product saturates.
                __m256i weight = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p + j));
                for (int r = 0; r < R; r++)
                    sum[r][j] = _mm256_add_epi32(sum[r][j], _mm256_madd_epi16(value[r], weight));
            }
        }
        for (int r = 0; r < R; r++)
            for (int j = 0; j < 2; j++) {
                __m256i pairs = _mm256_hadd_epi32(sum[r][2 * j], sum[r][2 * j + 1]);
                pairs = _mm256_permute4x64_epi64(pairs, 0xd8);
                _mm256_storeu_si256((__m256i*)(out[r] + v * LANES + 8 * j), pairs);
            }
    }
}

#else

constexpr int I8_ROWS = 4;
constexpr bool OFFSET = false;

template <int R>
FS_INLINE void sum_i8(const int8_t* w, int quads, const uint8_t* q, int64_t q_stride,
                      int32_t (*out)[PANEL]) {
    for (int v = 0; v < VECTORS; v++)
        for (int j = 0; j < 4; j++) {  // four outputs, two halves each
            int32x4_t low[R], high[R];
            for (int r = 0; r < R; r++) low[r] = high[r] = vdupq_n_s32(0);
            for (int i = 0; i < quads; i++) {
                int8x16_t weight = vld1q_s8(w + ((int64_t)i * PANEL + v * LANES + 4 * j) * 4);
                for (int r = 0; r < R; r++) {
                    uint32_t four;
                    std::memcpy(&four, q + r * q_stride + 4 * i, 4);
                    int8x8_t value = vreinterpret_s8_u32(vdup_n_u32(four ^ 0x80808080u));
                    low[r] = vpadalq_s16(low[r], vmull_s8(vget_low_s8(weight), value));
                    high[r] = vpadalq_s16(high[r], vmull_s8(vget_high_s8(weight), value));
                }
            }
            for (int r = 0; r < R; r++)
                vst1q_s32(out[r] + v * LANES + 4 * j, vpaddq_s32(low[r], high[r]));
        }
}

#endif

template <int R>
void panel_i8(const Packed& w, int p, const Rows& rows, int row, float* y, int64_t y_stride,
              bool add) {
    int quads = (int)(padded(w.k) / 4);
    alignas(64) int32_t sum[R][PANEL];
    const int8_t* data = (const int8_t*)w.data + (int64_t)p * quads * PANEL * 4;
    sum_i8<R>(data, quads, rows.q + row * padded(w.k), padded(w.k), sum);
    int valid = std::min(PANEL, w.n - p * PANEL);
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) {
            int at = p * PANEL + v * LANES;
            if (OFFSET)
                for (int i = 0; i < LANES; i++) sum[r][v * LANES + i] -= w.sums[at + i];
            vf value = load_i32(sum[r] + v * LANES) * (load(w.scale + at) * set1(rows.scale[row + r]));
            finish(y + (row + r) * y_stride + at, value, w.bias ? w.bias + at : nullptr,
                   valid - v * LANES, add);
        }
}

void integers(const Packed& w, const Rows& rows, int begin, int end, float* y, int64_t y_stride,
              bool add) {
    using Panel = void (*)(const Packed&, int, const Rows&, int, float*, int64_t, bool);
    static const Panel by_rows[] = {
        nullptr, panel_i8<1>, panel_i8<2>, panel_i8<3>, panel_i8<4>,
        panel_i8<5>, panel_i8<6>, panel_i8<7>, panel_i8<8>,
    };
    for (int p = begin; p < end; p++)
        for (int row = 0; row < rows.count;) {
            int count = std::min(I8_ROWS, rows.count - row);
            by_rows[count](w, p, rows, row, y, y_stride, add);
            row += count;
        }
}

uint16_t to_bf16(float x) {  // to nearest, ties to even; a NaN stays one
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)(bits >> 16) | 0x40;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

int32_t nearest(float x) {  // ties to even, without the C library
    return (int32_t)__builtin_rintf(x);
}

void pack_i8_row(const float* w, int64_t row, int64_t k, int8_t* data, float* scale,
                 int32_t* sums) {
    float top = 0.0f;
    for (int64_t i = 0; i < k; i++) top = std::max(top, __builtin_fabsf(w[i]));
    float inverse = top > 0.0f ? 127.0f / top : 0.0f;
    int8_t* out = data + (row / PANEL) * padded(k) * PANEL;
    int32_t sum = 0;
    for (int64_t i = 0; i < padded(k); i++) {
        int32_t value = i < k ? nearest(w[i] * inverse) : 0;
        out[((i / 4) * PANEL + row % PANEL) * 4 + i % 4] = (int8_t)value;
        sum += value;
    }
    scale[row] = top / 127.0f;
    sums[row] = 128 * sum;
}

}  // namespace

int64_t packed_bytes(int kind, int64_t n, int64_t k) {
    int64_t rows = (n + PANEL - 1) / PANEL * PANEL;
    if (kind == I8) return rows * padded(k);
    return rows * k * (kind == F32 ? 4 : 2);
}

void pack(int kind, const float* w, int64_t first, int64_t count, int64_t k, void* data,
          float* scale, int32_t* sums) {
    if (kind == I8) {
        for (int64_t r = 0; r < count; r++)
            pack_i8_row(w + r * k, first + r, k, (int8_t*)data, scale, sums);
        return;
    }
    for (int64_t top = 0; top < count; top += PANEL) {
        int64_t base = (first + top) / PANEL * k * PANEL;
        int rows = (int)std::min<int64_t>(PANEL, count - top);
        for (int64_t i = 0; i < k; i++)
            for (int r = 0; r < rows; r++) {
                float value = w[(top + r) * k + i];
                if (kind == F32)
                    ((float*)data)[base + i * PANEL + r] = value;
                else
                    ((uint16_t*)data)[base + i * PANEL + r] = to_bf16(value);
            }
    }
}

void unpack_row(const Packed& w, int64_t index, float* out) {
    int64_t panel = index / PANEL, lane = index % PANEL;
    if (w.kind == I8) {
        const int8_t* p = (const int8_t*)w.data + panel * padded(w.k) * PANEL + lane * 4;
        for (int i = 0; i < w.k; i++)
            out[i] = (float)p[(int64_t)(i / 4) * PANEL * 4 + i % 4] * w.scale[index];
        return;
    }
    int64_t base = panel * w.k * PANEL + lane;
    for (int i = 0; i < w.k; i++) {
        if (w.kind == F32) {
            out[i] = ((const float*)w.data)[base + (int64_t)i * PANEL];
        } else {
            uint32_t bits = (uint32_t)((const uint16_t*)w.data)[base + (int64_t)i * PANEL] << 16;
            std::memcpy(out + i, &bits, 4);
        }
    }
}

void quantise(const Rows& rows, int k, int begin, int end) {
    for (int row = begin; row < end; row++) {
        const float* x = rows.x + row * rows.stride;
        vf top = zero();
        int whole = k / LANES * LANES;
        for (int i = 0; i < whole; i += LANES) top = max(abs(load(x + i)), top);
        if (whole < k) top = max(abs(load_part(x + whole, k - whole)), top);
        float largest = reduce_max(top);
        float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        uint8_t* q = rows.q + row * padded(k);
        for (int i = 0; i < k; i++) q[i] = (uint8_t)(nearest(x[i] * inverse) + 128);
        for (int64_t i = k; i < padded(k); i++) q[i] = 128;
        rows.scale[row] = largest / 127.0f;
    }
}

void linear(const Packed& w, const Rows& rows, int begin, int end, float* y, int64_t y_stride,
            bool add) {
    if (w.kind == F32)
        floats<float>(w, rows, begin, end, y, y_stride, add);
    else if (w.kind == BF16)
        floats<uint16_t>(w, rows, begin, end, y, y_stride, add);
    else
        integers(w, rows, begin, end, y, y_stride, add);
}

}  // namespace fs

int64_t fs_packed_bytes(int kind, int64_t n, int64_t k) { return fs::packed_bytes(kind, n, k); }

void fs_pack(int kind, const float* w, int64_t n, int64_t k, void* data, float* scale,
             int32_t* sums, int threads) {
    fs::Team team(threads);
    team.run([&](int) {
        for (int64_t row; (row = (int64_t)team.take() * fs::PANEL) < n;)
            fs::pack(kind, w + row * k, row, std::min<int64_t>(fs::PANEL, n - row), k, data, scale,
                     sums);
    });
}

void fs_linear(const fs::Packed* w, const float* x, int64_t m, float* y, int threads) {
    std::vector<uint8_t> integers(m * fs::padded(w->k));
    std::vector<float> scale(m);
    fs::Rows rows{x, w->k, integers.data(), scale.data(), (int)m};
    if (w->kind == fs::I8) fs::quantise(rows, w->k, 0, (int)m);
    fs::Team team(threads);
    team.run([&](int) {
        for (int p; (p = team.take()) < w->panels();)
            fs::linear(*w, rows, p, p + 1, y, w->n, false);
    });
}
