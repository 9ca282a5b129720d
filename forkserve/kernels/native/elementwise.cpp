#include "elementwise.h"

#include "simd.h"

namespace fs {
namespace {

// body(vector index offset, lanes): whole vectors, then the rest through a padded one.
template <class Body>
FS_INLINE void each(int64_t n, Body body) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) body(i, LANES);
    if (i < n) body(i, (int)(n - i));
}
FS_INLINE vf get(const float* p, int lanes) {
    return lanes == LANES ? load(p) : load_part(p, lanes);
}
FS_INLINE void put(float* p, vf x, int lanes) {
    if (lanes == LANES)
        store(p, x);
    else
        store_part(p, x, lanes);
}

FS_INLINE vf silu(vf x) { return x / (set1(1.0f) + exp(zero() - x)); }

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) = x / (1 + e^-2z)
FS_INLINE vf gelu_tanh(vf x) {
    vf cubic = fma(x * x * x, set1(0.044715f), x);
    return x / (set1(1.0f) + exp(cubic * set1(-1.5957691216057308f)));
}

}  // namespace

void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
    vf squares = zero();
    each(n, [&](int64_t i, int lanes) {
        vf value = get(x + i, lanes);
        squares = fma(value, value, squares);
    });
    float mean = reduce_add(squares) / (float)n;
    vf factor = set1(1.0f / __builtin_sqrtf(mean + eps));
    each(n, [&](int64_t i, int lanes) {
        put(out + i, get(x + i, lanes) * factor * get(weight + i, lanes), lanes);
    });
}

void rope(float* x, int heads, int dim, const float* cos, const float* sin) {
    int half = dim / 2;
    for (int h = 0; h < heads; h++, x += dim)
        each(half, [&](int64_t i, int lanes) {
            vf a = get(x + i, lanes), b = get(x + half + i, lanes);
            vf c = get(cos + i, lanes), s = get(sin + i, lanes);
            put(x + i, fma(a, c, zero() - b * s), lanes);
            put(x + half + i, fma(b, c, a * s), lanes);
        });
}

void activate(int act, float* gate, const float* up, int n) {
    each(n, [&](int64_t i, int lanes) {
        vf value = get(gate + i, lanes);
        value = act == SILU ? silu(value) : gelu_tanh(value);
        put(gate + i, value * get(up + i, lanes), lanes);
    });
}

void soft_cap(float* x, int64_t n, float cap) {
    each(n, [&](int64_t i, int lanes) {
        put(x + i, set1(cap) * tanh(get(x + i, lanes) / set1(cap)), lanes);
    });
}

void accumulate(float* x, const float* y, int n) {
    each(n, [&](int64_t i, int lanes) { put(x + i, get(x + i, lanes) + get(y + i, lanes), lanes); });
}

void multiply(float* x, float factor, int n) {
    each(n, [&](int64_t i, int lanes) { put(x + i, get(x + i, lanes) * set1(factor), lanes); });
}

int32_t largest(const float* x, int64_t n) {
    float top = x[0], faults = 0;  // 0, or NaN if an x is NaN or infinite
    int64_t whole = n / LANES * LANES;
    if (whole) {
        vf tops = load(x), none = zero(), sum = none * tops;
        for (int64_t i = LANES; i < whole; i += LANES) {
            vf next = load(x + i);
            tops = max(next, tops);
            sum = fma(none, next, sum);
        }
        top = reduce_max(tops);
        faults = reduce_add(sum);
    }
    for (int64_t i = whole; i < n; i++) {
        top = x[i] > top ? x[i] : top;
        faults += 0 * x[i];
    }
    if (faults != 0)
        for (int64_t i = 0; i < n; i++)
            if (x[i] != x[i]) return (int32_t)i;
    for (int64_t i = 0; i < n; i++)
        if (x[i] == top) return (int32_t)i;
    return 0;
}

}  // namespace fs
