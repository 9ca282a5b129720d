#include "gemm.h"

#include <algorithm>

#include "bf16.h"
#include "gemm_bf16.h"
#include "gemm_w8a16.h"
#include "threads.h"

namespace fs {
namespace {

constexpr int VECTORS = PANEL / LANES;

// Rows x vectors of accumulators: as many as the registers hold.
#if defined(__AVX512F__)
constexpr int ROWS = 8, WIDE_ROWS = 8;
#else
constexpr int ROWS = 6, WIDE_ROWS = 2;  // beyond 2 rows one vector of 16 outputs at a time
#endif

// What differs between kinds of weights.  BLOCK: k's whose products are summed before they join the
// total; blocks halve the rounding error, and a fixed order it is all the same.
struct Float32 {
    using Weight = float;
    static constexpr int BLOCK = 192, BYTES = BLOCK * PANEL * 4;
    FS_INLINE static vf load_weight(const float* p) { return load(p); }
    FS_INLINE static vf join(vf total, vf sum, const float*, int) { return total + sum; }
};
struct Int8 {
    using Weight = int8_t;
    static constexpr int BLOCK = I8_BLOCK, BYTES = BLOCK * PANEL + PANEL * 2;
    FS_INLINE static vf load_weight(const int8_t* p) { return load_i8(p); }
    FS_INLINE static vf join(vf total, vf sum, const int8_t* block, int at) {
        return fma(sum, load_bf16((const uint16_t*)(block + BLOCK * PANEL) + at), total);
    }
};

// The part of a panel's data that block `number` of k is.
template <class Kind>
FS_INLINE const typename Kind::Weight* block_of(const void* panel, int64_t number) {
    return (const typename Kind::Weight*)((const char*)panel + number * Kind::BYTES);
}

// R rows by V vectors of one panel, from its output `at` on.
template <class Kind, int R, int V, bool FETCH>
FS_INLINE void tile(const void* panel, const float* bias, int k, const float* x, int64_t x_stride,
                    float* y, int64_t y_stride, int at, int valid, bool add) {
    vf total[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) total[r][v] = zero();
    for (int first = 0; first < k; first += Kind::BLOCK) {
        const auto* block = block_of<Kind>(panel, first / Kind::BLOCK);
        vf sum[R][V];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sum[r][v] = zero();
        int count = std::min(Kind::BLOCK, k - first);
        for (int i = 0; i < count; i++) {
            vf weight[V];
            if (FETCH) fetch<PANEL * sizeof(*block)>(block + i * PANEL);
            for (int v = 0; v < V; v++)
                weight[v] = Kind::load_weight(block + i * PANEL + at + v * LANES);
            for (int r = 0; r < R; r++) {
                vf value = set1(x[r * x_stride + first + i]);
                for (int v = 0; v < V; v++) sum[r][v] = fma(value, weight[v], sum[r][v]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++)
                total[r][v] = Kind::join(total[r][v], sum[r][v], block, at + v * LANES);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            int output = at + v * LANES;
            finish(y + r * y_stride + output, total[r][v], bias ? bias + output : nullptr,
                   valid - output, add);
        }
}

template <class Kind, int R>
void rows_of_panel(const void* panel, const float* bias, int k, const float* x, int64_t x_stride,
                   float* y, int64_t y_stride, int valid, bool add) {
    constexpr int V = R <= WIDE_ROWS ? VECTORS : 1;
    tile<Kind, R, V, true>(panel, bias, k, x, x_stride, y, y_stride, 0, valid, add);
    for (int at = V * LANES; at < PANEL; at += V * LANES)
        tile<Kind, R, V, false>(panel, bias, k, x, x_stride, y, y_stride, at, valid, add);
}

template <class Kind>
int64_t panel_bytes(int64_t k) {
    if (Kind::BLOCK == I8_BLOCK) return (k + I8_BLOCK - 1) / I8_BLOCK * Kind::BYTES;
    return k * PANEL * (int64_t)sizeof(typename Kind::Weight);
}

template <class Kind>
void product(const Packed& w, const float* x, int64_t x_stride, int rows, int begin, int end,
             float* y, int64_t y_stride, bool add) {
    using Body = void (*)(const void*, const float*, int, const float*, int64_t, float*, int64_t,
                          int, bool);
    static constexpr Body body[] = {
        nullptr,
        rows_of_panel<Kind, 1>,
        rows_of_panel<Kind, 2>,
        rows_of_panel<Kind, 3>,
        rows_of_panel<Kind, 4>,
        rows_of_panel<Kind, 5>,
        rows_of_panel<Kind, 6>,
#if defined(__AVX512F__)
        rows_of_panel<Kind, 7>,
        rows_of_panel<Kind, 8>,
#endif
    };
    for (int p = begin; p < end; p++) {
        const char* panel = (const char*)w.data + p * panel_bytes<Kind>(w.k);
        const float* bias = w.bias ? w.bias + p * PANEL : nullptr;
        for (int row = 0, count; row < rows; row += count) {
            count = std::min(ROWS, rows - row);
            body[count](panel, bias, w.k, x + row * x_stride, x_stride,
                        y + row * y_stride + p * PANEL, y_stride, w.n - p * PANEL, add);
        }
    }
}

// One block of one output: integers round(w / scale) in -127..127, scale = max |w| / 127 rounded
// to bfloat16 first.
void pack_block(const float* w, int count, int lane, int8_t* block) {
    float top = 0.0f;
    for (int i = 0; i < count; i++) top = std::max(top, __builtin_fabsf(w[i]));
    uint16_t stored = to_bf16(top / 127.0f);
    float scale = from_bf16(stored);
    float inverse = scale >= __FLT_MIN__ ? 1.0f / scale : 0.0f;  // finite
    for (int i = 0; i < count; i++) {
        float value = __builtin_rintf(w[i] * inverse);
        block[i * PANEL + lane] = (int8_t)std::min(std::max(value, -127.0f), 127.0f);
    }
    std::memcpy(block + I8_BLOCK * PANEL + 2 * lane, &stored, 2);
}

// Rows [0, rows) of w to the panel at `data`, which holds zeros.
void pack_panel(int kind, const float* w, int rows, int64_t k, void* data) {
    if (kind == I8) {
        for (int r = 0; r < rows; r++)
            for (int64_t i = 0; i < k; i += I8_BLOCK)
                pack_block(w + r * k + i, (int)std::min<int64_t>(I8_BLOCK, k - i), r,
                           (int8_t*)data + i / I8_BLOCK * Int8::BYTES);
        return;
    }
    if (kind == BF16) return bf16_pack_panel(w, rows, k, (uint16_t*)data);
    if (kind == W8A16) return w8a16_pack_panel(w, rows, k, data);
    for (int64_t i = 0; i < k; i++)
        for (int r = 0; r < rows; r++) ((float*)data)[i * PANEL + r] = w[r * k + i];
}

int64_t panel_bytes(int kind, int64_t k) {
    if (kind == I8) return panel_bytes<Int8>(k);
    if (kind == W8A16) return w8a16_panel_bytes(k);
    return kind == F32 ? panel_bytes<Float32>(k) : bf16_panel_bytes(k);
}

}  // namespace

void unpack_row(const Packed& w, int64_t index, float* out) {
    const char* panel = (const char*)w.data + index / PANEL * panel_bytes(w.kind, w.k);
    int64_t lane = index % PANEL;
    if (w.kind == BF16) return bf16_unpack((const uint16_t*)panel, lane, w.k, out);
    if (w.kind == W8A16) return w8a16_unpack(panel, lane, w.k, out);
    for (int64_t i = 0; i < w.k; i++) {
        if (w.kind == F32) {
            out[i] = ((const float*)panel)[i * PANEL + lane];
        } else {
            const char* block = panel + i / I8_BLOCK * Int8::BYTES;
            uint16_t scale;
            std::memcpy(&scale, block + I8_BLOCK * PANEL + 2 * lane, 2);
            out[i] = (float)((const int8_t*)block)[i % I8_BLOCK * PANEL + lane] * from_bf16(scale);
        }
    }
}

int64_t ready_floats(int kind, int64_t rows, int64_t k) {
    return kind == W8A16 ? w8a16_ready_floats(rows, k) : bf16_ready_floats(rows, k);
}

void ready(const Packed& w, const float* x, int rows, int begin, int end, float* out) {
    auto body = w.kind == W8A16 ? w8a16_ready : bf16_ready;
    body(x, rows, begin, end, w.k, out);
}

void linear(const Packed& w, const float* x, int64_t x_stride, int rows, int begin, int end,
            float* y, int64_t y_stride, bool add) {
    if (w.kind == F32)
        product<Float32>(w, x, x_stride, rows, begin, end, y, y_stride, add);
    else if (w.kind == BF16)
        bf16_linear(w, x, rows, begin, end, y, y_stride, add);
    else if (w.kind == W8A16)
        w8a16_linear(w, x, rows, begin, end, y, y_stride, add);
    else
        product<Int8>(w, x, x_stride, rows, begin, end, y, y_stride, add);
}

}  // namespace fs

int64_t fs_packed_bytes(int kind, int64_t n, int64_t k) {
    return (n + fs::PANEL - 1) / fs::PANEL * fs::panel_bytes(kind, k);
}

int fs_pack(int kind, const float* w, int64_t n, int64_t k, void* data, int threads) {
    try {
        fs::Team team(threads);
        team.run([&](int) {
            for (int64_t p; (p = team.take()) * fs::PANEL < n;) {
                int rows = (int)std::min<int64_t>(fs::PANEL, n - p * fs::PANEL);
                fs::pack_panel(kind, w + p * fs::PANEL * k, rows, k,
                               (char*)data + p * fs::panel_bytes(kind, k));
            }
        });
    } catch (const std::exception&) {
        return 1;
    }
    return 0;
}

int fs_linear(const fs::Packed* w, const float* x, int64_t m, float* y, int threads) {
    try {
        fs::Team team(threads);
        std::vector<float> rounded;
        if (fs::takes_ready(*w)) {
            rounded.resize(fs::ready_floats(w->kind, m, w->k));
            fs::ready(*w, x, (int)m, 0, (int)m, rounded.data());
            x = rounded.data();
        }
        team.run([&](int) {
            for (int p; (p = team.take()) < w->panels();)
                fs::linear(*w, x, w->k, (int)m, p, p + 1, y, w->n, false);
        });
    } catch (const std::exception&) {
        return 1;
    }
    return 0;
}
