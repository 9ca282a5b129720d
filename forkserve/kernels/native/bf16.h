// bfloat16 on every instruction set: rounding, and operands in pairs.
//
// Products of bfloat16 have the order of Intel's TDPBF16PS ("Intel 64 and IA-32 Architectures
// Software Developer's Manual", volume 2), so that a matrix unit and vectors give the same bits.
// Inputs come in blocks of 32.  Within a block those at even places and those at odd places are
// summed apart, from 0, each by 16 fused steps; even + odd joins the total.  A denormal number
// is 0, as an operand and as a result.  (ARM looks for denormal results before rounding, x86 after it:
// what rounds up to 2^-126 is 0 there.)
#pragma once

#include "simd.h"

namespace fs {

constexpr int PAIRED = 32;  // inputs of a block

inline uint16_t to_bf16(float x) {  // to nearest, ties to even; a NaN stays one
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bool nan = (bits & 0x7fffffff) > 0x7f800000;  // rounding up would make it another number
    return (uint16_t)(nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Denormal numbers are 0 for this thread's vectors while one of these lives.  What computes must be
// in a function of its own: compilers move arithmetic past the switch.
class FlushDenormals {
   public:
#if defined(__AVX2__)
    FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before_); }

   private:
    unsigned before_;
#else
    FlushDenormals() {
        __asm__ __volatile__("mrs %0, fpcr" : "=r"(before_));
        __asm__ __volatile__("msr fpcr, %0" : : "r"(before_ | (1u << 24)) : "memory");
    }
    ~FlushDenormals() { __asm__ __volatile__("msr fpcr, %0" : : "r"(before_) : "memory"); }

   private:
    uint64_t before_;
#endif
    FlushDenormals(const FlushDenormals&) = delete;
};

struct Pairs {
    vf even, odd;
};

// x rounded to bfloat16, to nearest, ties to even.  Denormal numbers become 0, a NaN stays one.
//
// load_pairs: 16 pairs of bfloat16, whose first halves are `even`.
// store_bf16: 16 values that are bfloat16 already.
// store_rounded: x rounded, which is stored as bfloat16 too.
#if defined(__AVX512F__)

#if defined(__AVX512BF16__)
FS_INLINE vf rounded(vf x) {
    __m512i wide = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x.a));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
#else
FS_INLINE vf rounded(vf x) {
    const __m512i bits = _mm512_castps_si512(x.a), high = _mm512_set1_epi32((int)0xffff0000);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x.a, x.a, _CMP_UNORD_Q);
    up = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
    // Without an exponent only the sign stays.
    __mmask16 some = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
    __m512i keep = _mm512_mask_blend_epi32(some, _mm512_set1_epi32((int)0x80000000), high);
    return {_mm512_castsi512_ps(_mm512_and_si512(up, keep))};
}
#endif
FS_INLINE Pairs load_pairs(const uint16_t* p) {
    __m512i both = _mm512_loadu_si512(p);
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))},
            {_mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000)))}};
}
FS_INLINE void store_bf16(uint16_t* p, vf x) {
    __m512i word = _mm512_srli_epi32(_mm512_castps_si512(x.a), 16);
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(word));
}

#elif defined(__AVX2__)

FS_INLINE __m256 rounded_(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), exponent = _mm256_set1_epi32(0x7f800000);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    up = _mm256_blendv_epi8(up, quiet, nan);
    __m256i none = _mm256_cmpeq_epi32(_mm256_and_si256(bits, exponent), _mm256_setzero_si256());
    __m256i keep = _mm256_blendv_epi8(_mm256_set1_epi32((int)0xffff0000),
                                      _mm256_set1_epi32((int)0x80000000), none);
    return _mm256_castsi256_ps(_mm256_and_si256(up, keep));
}
FS_INLINE vf rounded(vf x) { return {rounded_(x.a), rounded_(x.b)}; }
FS_INLINE Pairs load_pairs(const uint16_t* p) {
    const __m256i low = _mm256_loadu_si256((const __m256i*)p);
    const __m256i up = _mm256_loadu_si256((const __m256i*)(p + 16));
    const __m256i high = _mm256_set1_epi32((int)0xffff0000);
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)),
             _mm256_castsi256_ps(_mm256_slli_epi32(up, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(low, high)),
             _mm256_castsi256_ps(_mm256_and_si256(up, high))}};
}
FS_INLINE void store_bf16(uint16_t* p, vf x) {
    __m256i low = _mm256_srli_epi32(_mm256_castps_si256(x.a), 16);
    __m256i high = _mm256_srli_epi32(_mm256_castps_si256(x.b), 16);
    __m256i mixed = _mm256_packus_epi32(low, high);  // by halves of 128 bits
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(mixed, 0xd8));
}

#else  // NEON

FS_INLINE vf rounded(vf x) {
    vf out;
    for (int i = 0; i < 4; i++) {
        uint32x4_t bits = vreinterpretq_u32_f32(x.r[i]), exponent = vdupq_n_u32(0x7f800000);
        uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
        uint32x4_t nan = vcgtq_u32(vandq_u32(bits, vdupq_n_u32(0x7fffffff)), exponent);
        up = vbslq_u32(nan, quiet, up);
        uint32x4_t keep = vbslq_u32(vtstq_u32(bits, exponent), vdupq_n_u32(0xffff0000),
                                    vdupq_n_u32(0x80000000));
        out.r[i] = vreinterpretq_f32_u32(vandq_u32(up, keep));
    }
    return out;
}
FS_INLINE Pairs load_pairs(const uint16_t* p) {
    Pairs out;
    for (int i = 0; i < 4; i++) {
        uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(p + 8 * i));
        out.even.r[i] = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
        out.odd.r[i] = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000)));
    }
    return out;
}
FS_INLINE void store_bf16(uint16_t* p, vf x) {
    for (int i = 0; i < 4; i++)
        vst1_u16(p + 4 * i, vshrn_n_u32(vreinterpretq_u32_f32(x.r[i]), 16));
}

#endif

#if defined(__AVX512BF16__)
FS_INLINE vf store_rounded(uint16_t* p, vf x) {
    const __m256i narrow = (__m256i)_mm512_cvtneps_pbh(x.a);
    _mm256_storeu_si256((__m256i*)p, narrow);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16))};
}
#else
FS_INLINE vf store_rounded(uint16_t* p, vf x) {
    x = rounded(x);
    store_bf16(p, x);
    return x;
}
#endif

}  // namespace fs
