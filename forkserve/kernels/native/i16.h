// Sums of products of 8-bit and 16-bit integers, on every instruction set.  They are exact.
#pragma once

#include "simd.h"

namespace fs {

constexpr int QUAD = 4;  // products that join a sum at a time

// 16 sums of 32 bits, and operands: four weights for each sum, or four inputs for all.
//
// widen: [16][4] weights.  dot: sums + the products of each one's four weights with four inputs.
// to_float: the sums as floats, rounded to nearest.  store_i16: whole numbers within 16 bits.
#if defined(__AVX512VNNI__)

struct Sums {
    __m512i a, b;  // two lanes a sum
};
struct Weights {
    __m512i a, b;
};
using Inputs = __m512i;

FS_INLINE Sums no_sums() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
FS_INLINE Weights widen(const int8_t* p) {
    return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)),
            _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(p + 32)))};
}
FS_INLINE Inputs four(const int16_t* p) {
    long long bits;
    std::memcpy(&bits, p, 8);
    return _mm512_set1_epi64(bits);
}
FS_INLINE Sums dot(Sums s, Weights w, Inputs x) {
    return {_mm512_dpwssd_epi32(s.a, w.a, x), _mm512_dpwssd_epi32(s.b, w.b, x)};
}
FS_INLINE vf to_float(Sums s) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_permutex2var_epi32(s.a, even, s.b),
                                                _mm512_permutex2var_epi32(s.a, odd, s.b)))};
}
FS_INLINE void store_i16(int16_t* p, vf x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x.a)));
}

#elif defined(__AVX2__)

struct Sums {
    __m256i r[4];  // two lanes a sum
};
struct Weights {
    __m256i r[4];
};
using Inputs = __m256i;

FS_INLINE Sums no_sums() {
    const __m256i none = _mm256_setzero_si256();
    return {{none, none, none, none}};
}
FS_INLINE Weights widen(const int8_t* p) {
    Weights w;
    for (int i = 0; i < 4; i++)
        w.r[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16 * i)));
    return w;
}
FS_INLINE Inputs four(const int16_t* p) {
    long long bits;
    std::memcpy(&bits, p, 8);
    return _mm256_set1_epi64x(bits);
}
FS_INLINE Sums dot(Sums s, Weights w, Inputs x) {
    for (int i = 0; i < 4; i++)
        s.r[i] = _mm256_add_epi32(s.r[i], _mm256_madd_epi16(w.r[i], x));
    return s;
}
FS_INLINE __m256 pair_float_(__m256i low, __m256i high) {
    __m256i mixed = _mm256_hadd_epi32(low, high);  // by halves of 128 bits
    return _mm256_cvtepi32_ps(_mm256_permute4x64_epi64(mixed, 0xd8));
}
FS_INLINE vf to_float(Sums s) {
    return {pair_float_(s.r[0], s.r[1]), pair_float_(s.r[2], s.r[3])};
}
FS_INLINE void store_i16(int16_t* p, vf x) {
    __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(mixed, 0xd8));
}

#else  // NEON

struct Sums {
    int32x4_t r[8];  // two lanes a sum
};
struct Weights {
    int16x8_t r[8];
};
using Inputs = int16x4_t;

FS_INLINE Sums no_sums() {
    Sums s;
    for (int i = 0; i < 8; i++) s.r[i] = vdupq_n_s32(0);
    return s;
}
FS_INLINE Weights widen(const int8_t* p) {
    Weights w;
    for (int i = 0; i < 8; i++) w.r[i] = vmovl_s8(vld1_s8(p + 8 * i));
    return w;
}
FS_INLINE Inputs four(const int16_t* p) { return vld1_s16(p); }
FS_INLINE Sums dot(Sums s, Weights w, Inputs x) {
    for (int i = 0; i < 8; i++)
        s.r[i] = vaddq_s32(s.r[i], vpaddq_s32(vmull_s16(vget_low_s16(w.r[i]), x),
                                              vmull_s16(vget_high_s16(w.r[i]), x)));
    return s;
}
FS_INLINE vf to_float(Sums s) {
    vf out;
    for (int i = 0; i < 4; i++) out.r[i] = vcvtq_f32_s32(vpaddq_s32(s.r[2 * i], s.r[2 * i + 1]));
    return out;
}
FS_INLINE void store_i16(int16_t* p, vf x) {
    for (int i = 0; i < 4; i++) vst1_s16(p + 4 * i, vmovn_s32(vcvtnq_s32_f32(x.r[i])));
}

#endif

}  // namespace fs
