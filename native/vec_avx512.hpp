// 16 lanes in one AVX-512 register, integer dot products by VNNI.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace paceline {

struct Avx512 {
  using F = __m512;
  using I = __m512i;

  static constexpr bool kNarrow = false;         // no integer dot products that add in 32 bits
  static constexpr bool kManyRegisters = true;  // room for sums of two panels, or tiles of keys

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static F load_bf16(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static F load_i8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static F load_u8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static void store_i8(int8_t* p, I x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x)); }
  static void store_i16(int16_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
  }

  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }  // b where one of them is NaN, as min
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  // Compared as integers, where NaN and infinity are larger than numbers.
  static F larger_magnitude(F a, F b) { return _mm512_castsi512_ps(_mm512_max_epi32(magnitude(a), magnitude(b))); }
  static float largest_magnitude(F x) {
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(magnitude(x)))));
  }
  static F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F zero_below(F x, F limit, F y) {  // 0 where x < limit, else y: also for NaN
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y);
  }
  static F scale_by_power(F x, F n) { return _mm512_scalef_ps(x, n); }  // x * 2^n for whole n in -126..127
  static float sum(F x) {  // pairs 8, 4, 2, 1 apart
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
  }
  static float largest(F x) { return _mm512_reduce_max_ps(x); }

  static I zero_i() { return _mm512_setzero_si512(); }
  static I set1_shifted(const int32_t* p, int shift) { return _mm512_slli_epi32(_mm512_set1_epi32(*p), shift); }
  static I load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static I low_nibbles(I x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
  static I high_nibbles(I x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
  // nibbles | bits 2i, 2i+1 of a plane as bits 4, 5
  template <int i>
  static I with_high_bits(I nibbles, I plane) {
    const I moved = i < 2 ? _mm512_slli_epi16(plane, 4 - 2 * i) : _mm512_srli_epi16(plane, 2 * i - 4);
    return _mm512_or_si512(nibbles, _mm512_and_si512(moved, _mm512_set1_epi8(0x30)));
  }
  static I set1_bytes(const int8_t* p) {  // 4 bytes into each lane
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
  }
  // acc + 4 unsigned bytes of each lane of w times the 4 signed bytes of x's
  static I dot(I acc, I w, I x) {
    return _mm512_dpbusd_epi32(acc, w, x);
  }
  // 2 words of each lane: as they are, or from bytes; acc + the products of a's and b's, added
  static I load_pairs(const int16_t* p) { return _mm512_loadu_si512(p); }
  static I load_pairs(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static I dot_pairs(I acc, I a, I b) { return _mm512_dpwssd_epi32(acc, a, b); }
  static I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
  static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
  static I to_int(F x) { return _mm512_cvtps_epi32(x); }  // nearest, ties to even
  static int32_t sum_i(I x) { return _mm512_reduce_add_epi32(x); }

  // One bit a lane.
  static uint32_t gt(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static uint32_t ge(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
  static uint32_t is_nan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }

  // Random words: 16 lanes, or 8 of 64 bits where halves are spoken of.
  static I load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static void store_words(uint32_t* p, I x) { _mm512_storeu_si512(p, x); }
  static I set1_word(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }
  static I bit_xor(I a, I b, I c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
  static I halved(I x) { return _mm512_srli_epi32(x, 1); }
  static F as_float(I x) { return _mm512_castsi512_ps(x); }
  static I multiply_low_halves(I a, I b) { return _mm512_mul_epu32(a, b); }
  static I high_halves(I x) { return _mm512_srli_epi64(x, 32); }
  static I join_low_halves(I low, I high) { return _mm512_mask_shuffle_epi32(low, 0xAAAA, high, _MM_PERM_CCAA); }
  static I even_lanes(I a, I b) { return _mm512_unpacklo_epi64(a, b); }  // of 64 bits: a0 b0 a2 b2 a4 b4 a6 b6
  static I odd_lanes(I a, I b) { return _mm512_unpackhi_epi64(a, b); }   // a1 b1 a3 b3 a5 b5 a7 b7
  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

 private:
  static __m512i magnitude(F x) { return _mm512_castps_si512(_mm512_abs_ps(x)); }
};

}  // namespace paceline
