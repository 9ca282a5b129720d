// A vector of 16 floats on every instruction set: one AVX-512 register, two AVX2, four NEON.
//
// The same function gives the same bits everywhere: each operation is IEEE and lane-wise, fused only
// where `fma` is written, and reductions add lanes i and i + 8, then + 4, + 2, + 1.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#else
#error "there are kernels for AVX2, AVX-512 and NEON only"
#endif

#define FS_INLINE inline __attribute__((always_inline))
#define FS_API extern "C" __attribute__((visibility("default")))

namespace fs {

constexpr int LANES = 16;

#if defined(__AVX512F__)

struct vf {
    __m512 a;
};
FS_INLINE vf zero() { return {_mm512_setzero_ps()}; }
FS_INLINE vf set1(float x) { return {_mm512_set1_ps(x)}; }
FS_INLINE vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
FS_INLINE void store(float* p, vf x) { _mm512_storeu_ps(p, x.a); }
FS_INLINE vf load_bf16(const uint16_t* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
FS_INLINE vf load_i8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
FS_INLINE vf fma(vf x, vf y, vf z) { return {_mm512_fmadd_ps(x.a, y.a, z.a)}; }
FS_INLINE vf operator+(vf x, vf y) { return {_mm512_add_ps(x.a, y.a)}; }
FS_INLINE vf operator-(vf x, vf y) { return {_mm512_sub_ps(x.a, y.a)}; }
FS_INLINE vf operator*(vf x, vf y) { return {_mm512_mul_ps(x.a, y.a)}; }
FS_INLINE vf operator/(vf x, vf y) { return {_mm512_div_ps(x.a, y.a)}; }
FS_INLINE vf max(vf x, vf y) { return {_mm512_max_ps(x.a, y.a)}; }
FS_INLINE vf min(vf x, vf y) { return {_mm512_min_ps(x.a, y.a)}; }
FS_INLINE vf abs(vf x) { return {_mm512_abs_ps(x.a)}; }
FS_INLINE vf round(vf x) { return {_mm512_roundscale_ps(x.a, 8)}; }  // to nearest, ties to even
// 2^n for whole n in -126..127.
FS_INLINE vf exp2_whole(vf n) {
    __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.a), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
// y where x < limit, else z.
FS_INLINE vf where_less(vf x, vf limit, vf y, vf z) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.a, limit.a, _CMP_LT_OQ), z.a, y.a)};
}
FS_INLINE __m256 fold_(vf x, bool sum) {
    __m256 low = _mm512_castps512_ps256(x.a);
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.a), 1));
    return sum ? _mm256_add_ps(low, high) : _mm256_max_ps(low, high);
}

#elif defined(__AVX2__)

struct vf {
    __m256 a, b;
};
FS_INLINE vf zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
FS_INLINE vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
FS_INLINE vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
FS_INLINE void store(float* p, vf x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
FS_INLINE __m256 widen_bf16_(const uint16_t* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
FS_INLINE vf load_bf16(const uint16_t* p) { return {widen_bf16_(p), widen_bf16_(p + 8)}; }
FS_INLINE __m256 widen_i8_(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
FS_INLINE vf load_i8(const int8_t* p) { return {widen_i8_(p), widen_i8_(p + 8)}; }
FS_INLINE vf fma(vf x, vf y, vf z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
FS_INLINE vf operator+(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
FS_INLINE vf operator-(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
FS_INLINE vf operator*(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
FS_INLINE vf operator/(vf x, vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
FS_INLINE vf max(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
FS_INLINE vf min(vf x, vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
FS_INLINE vf abs(vf x) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
FS_INLINE vf round(vf x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
FS_INLINE __m256 exp2_whole_(__m256 n) {
    __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
FS_INLINE vf exp2_whole(vf n) { return {exp2_whole_(n.a), exp2_whole_(n.b)}; }
FS_INLINE vf where_less(vf x, vf limit, vf y, vf z) {
    return {_mm256_blendv_ps(z.a, y.a, _mm256_cmp_ps(x.a, limit.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(z.b, y.b, _mm256_cmp_ps(x.b, limit.b, _CMP_LT_OQ))};
}
FS_INLINE __m256 fold_(vf x, bool sum) {
    return sum ? _mm256_add_ps(x.a, x.b) : _mm256_max_ps(x.a, x.b);
}

#else  // NEON

struct vf {
    float32x4_t r[4];
};
#define FS_EACH(expression)                      \
    vf out;                                      \
    for (int i = 0; i < 4; i++) out.r[i] = expression; \
    return out
FS_INLINE vf set1(float x) { FS_EACH(vdupq_n_f32(x)); }
FS_INLINE vf zero() { return set1(0.0f); }
FS_INLINE vf load(const float* p) { FS_EACH(vld1q_f32(p + 4 * i)); }
FS_INLINE void store(float* p, vf x) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.r[i]);
}
FS_INLINE vf load_bf16(const uint16_t* p) {
    FS_EACH(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)));
}
FS_INLINE vf load_i8(const int8_t* p) {
    int8x16_t bytes = vld1q_s8(p);
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
             vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
FS_INLINE vf fma(vf x, vf y, vf z) { FS_EACH(vfmaq_f32(z.r[i], x.r[i], y.r[i])); }
FS_INLINE vf operator+(vf x, vf y) { FS_EACH(vaddq_f32(x.r[i], y.r[i])); }
FS_INLINE vf operator-(vf x, vf y) { FS_EACH(vsubq_f32(x.r[i], y.r[i])); }
FS_INLINE vf operator*(vf x, vf y) { FS_EACH(vmulq_f32(x.r[i], y.r[i])); }
FS_INLINE vf operator/(vf x, vf y) { FS_EACH(vdivq_f32(x.r[i], y.r[i])); }
// As x86 does it: y where either is NaN or both are zeros.
FS_INLINE vf max(vf x, vf y) { FS_EACH(vbslq_f32(vcgtq_f32(x.r[i], y.r[i]), x.r[i], y.r[i])); }
FS_INLINE vf min(vf x, vf y) { FS_EACH(vbslq_f32(vcltq_f32(x.r[i], y.r[i]), x.r[i], y.r[i])); }
FS_INLINE vf abs(vf x) { FS_EACH(vabsq_f32(x.r[i])); }
FS_INLINE vf round(vf x) { FS_EACH(vrndnq_f32(x.r[i])); }
FS_INLINE vf exp2_whole(vf n) {
    FS_EACH(vreinterpretq_f32_s32(
        vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.r[i]), vdupq_n_s32(127)), 23)));
}
FS_INLINE vf where_less(vf x, vf limit, vf y, vf z) {
    FS_EACH(vbslq_f32(vcltq_f32(x.r[i], limit.r[i]), y.r[i], z.r[i]));
}
#undef FS_EACH

#endif

#if defined(__AVX2__)

FS_INLINE float reduce_(vf x, bool sum) {
    __m256 eight = fold_(x, sum);
    __m128 low = _mm256_castps256_ps128(eight), high = _mm256_extractf128_ps(eight, 1);
    __m128 four = sum ? _mm_add_ps(low, high) : _mm_max_ps(low, high);
    __m128 up = _mm_movehl_ps(four, four);
    __m128 two = sum ? _mm_add_ps(four, up) : _mm_max_ps(four, up);
    up = _mm_movehdup_ps(two);
    return _mm_cvtss_f32(sum ? _mm_add_ss(two, up) : _mm_max_ss(two, up));
}

#else

FS_INLINE float reduce_(vf x, bool sum) {
    float lane[LANES];
    store(lane, x);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) {
            float y = lane[i + width];
            lane[i] = sum ? lane[i] + y : (lane[i] > y ? lane[i] : y);
        }
    return lane[0];
}

#endif

FS_INLINE float reduce_add(vf x) { return reduce_(x, true); }
FS_INLINE float reduce_max(vf x) { return reduce_(x, false); }

// The first n of 16 lanes; the others are `fill`.
FS_INLINE vf load_part(const float* p, int n, float fill = 0.0f) {
    float lane[LANES];
    for (int i = 0; i < LANES; i++) lane[i] = i < n ? p[i] : fill;
    return load(lane);
}
FS_INLINE void store_part(float* p, vf x, int n) {
    float lane[LANES];
    store(lane, x);
    std::memcpy(p, lane, sizeof(float) * n);
}

// e^x within 1.1 units in the last place for x in [-87.3, 88.3]; 0 below, as if 88.3 above.
// Cody and Waite's reduction to |r| <= ln(2)/2, then a polynomial of degree 7 (Taylor's, whose
// remainder is 4e-9 there).
FS_INLINE vf exp_within(vf y) {  // of that range only
    vf n = round(y * set1(1.44269504088896341f));
    vf r = fma(n, set1(-0.693359375f), y);
    r = fma(n, set1(2.12194440e-4f), r);
    vf p = set1(1.0f / 5040);
    p = fma(p, r, set1(1.0f / 720));
    p = fma(p, r, set1(1.0f / 120));
    p = fma(p, r, set1(1.0f / 24));
    p = fma(p, r, set1(1.0f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(p * r, r, r) + set1(1.0f);
    return p * exp2_whole(n);
}
FS_INLINE vf exp(vf x) {
    vf y = exp_within(min(max(x, set1(-87.3f)), set1(88.3f)));
    return where_less(x, set1(-87.3f), zero(), y);
}

// tanh x within 2e-7 (absolute), 1 - 2 / (e^2x + 1).
FS_INLINE vf tanh(vf x) {
    return set1(1.0f) - set1(2.0f) / (exp(x + x) + set1(1.0f));
}

}  // namespace fs
