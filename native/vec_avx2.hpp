// 16 lanes in two AVX2 registers; integer dot products by AVX-VNNI where the machine has it (kVnni).
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace paceline {

template <bool kVnni>
struct Avx2 {
  struct F {
    __m256 a, b;
  };
  struct I {
    __m256i a, b;
  };

  static constexpr bool kNarrow = !kVnni;
  static constexpr bool kManyRegisters = false;

  static F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
  }
  static F load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(half_load(p)), _mm256_cvtph_ps(half_load(p + 8))}; }
  static F load_bf16(const uint16_t* p) { return {widen_bf16(half_load(p)), widen_bf16(half_load(p + 8))}; }
  static F load_i8(const int8_t* p) {
    const __m128i bytes = half_load(p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
  }
  static F load_u8(const uint8_t* p) {
    const __m128i bytes = half_load(p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
  }
  static void store_i8(int8_t* p, I x) {
    const __m256i both = words(x);
    half_store(p, _mm_packs_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1)));
  }
  static void store_i16(int16_t* p, I x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words(x)); }

  static F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  static F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  static F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
  static F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
  static F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
  static F larger_magnitude(F x, F y) {
    return {_mm256_castsi256_ps(_mm256_max_epi32(magnitude(x.a), magnitude(y.a))),
            _mm256_castsi256_ps(_mm256_max_epi32(magnitude(x.b), magnitude(y.b)))};
  }
  static float largest_magnitude(F x) {
    const __m256i a = _mm256_max_epi32(magnitude(x.a), magnitude(x.b));
    __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4E));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(b, _mm_shuffle_epi32(b, 0xB1))));
  }
  static F round(F x) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, kNearest), _mm256_round_ps(x.b, kNearest)};
  }
  static F zero_below(F x, F limit, F y) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_NLT_UQ), y.a),
            _mm256_and_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_NLT_UQ), y.b)};
  }
  static F scale_by_power(F x, F n) { return {_mm256_mul_ps(x.a, power(n.a)), _mm256_mul_ps(x.b, power(n.b))}; }
  static float sum(F x) {  // pairs 8, 4, 2, 1 apart
    const __m256 a = _mm256_add_ps(x.a, x.b);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
  }
  static float largest(F x) {
    const __m256 a = _mm256_max_ps(x.a, x.b);
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
  }

  static I zero_i() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static I set1_shifted(const int32_t* p, int shift) {
    const __m256i value = _mm256_slli_epi32(_mm256_set1_epi32(*p), shift);
    return {value, value};
  }
  static I load_bytes(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
  }
  static I low_nibbles(I x) { return masked(x, 0x0F); }
  static I high_nibbles(I x) { return masked({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}, 0x0F); }
  template <int i>
  static I with_high_bits(I nibbles, I plane) {
    I moved;
    if constexpr (i < 2) {
      moved = {_mm256_slli_epi16(plane.a, 4 - 2 * i), _mm256_slli_epi16(plane.b, 4 - 2 * i)};
    } else {
      moved = {_mm256_srli_epi16(plane.a, 2 * i - 4), _mm256_srli_epi16(plane.b, 2 * i - 4)};
    }
    moved = masked(moved, 0x30);
    return {_mm256_or_si256(nibbles.a, moved.a), _mm256_or_si256(nibbles.b, moved.b)};
  }
  static I set1_bytes(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return {_mm256_set1_epi32(four), _mm256_set1_epi32(four)};
  }
  static I dot(I acc, I w, I x) { return {dot_register(acc.a, w.a, x.a), dot_register(acc.b, w.b, x.b)}; }
  // sums of two products in 16 bits, which must fit; such sums added; and their pairs, times a factor, to 32 bits
  static I pair_products(I w, I x) { return {_mm256_maddubs_epi16(w.a, x.a), _mm256_maddubs_epi16(w.b, x.b)}; }
  static I add_pairs(I x, I y) {
    I sums{_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)};
    asm("" : "+x"(sums.a), "+x"(sums.b));  // added here: put off, products would wait in memory
    return sums;
  }
  static I add_widened(I acc, I pairs, int16_t factor) {
    const __m256i f = _mm256_set1_epi16(factor);
    return add_i(acc, {_mm256_madd_epi16(pairs.a, f), _mm256_madd_epi16(pairs.b, f)});
  }
  static I load_pairs(const int16_t* p) { return load_bytes(reinterpret_cast<const uint8_t*>(p)); }
  static I load_pairs(const int8_t* p) {
    return {_mm256_cvtepi8_epi16(half_load(p)), _mm256_cvtepi8_epi16(half_load(p + 16))};
  }
  static I dot_pairs(I acc, I x, I y) { return {dot_words(acc.a, x.a, y.a), dot_words(acc.b, x.b, y.b)}; }
  static I add_i(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
  static F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
  static I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
  static int32_t sum_i(I x) {
    const __m256i a = _mm256_add_epi32(x.a, x.b);
    __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    b = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xB1)));
  }

  static uint32_t gt(F x, F y) {
    return bits_of(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ));
  }
  static uint32_t ge(F x, F y) {
    return bits_of(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ));
  }
  static uint32_t is_nan(F x) {
    return bits_of(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q));
  }

  static I load_words(const uint32_t* p) { return load_bytes(reinterpret_cast<const uint8_t*>(p)); }
  static void store_words(uint32_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
  }
  static I set1_word(uint32_t x) {
    const __m256i value = _mm256_set1_epi32(static_cast<int>(x));
    return {value, value};
  }
  static I bit_xor(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
  static I bit_xor(I x, I y, I z) { return bit_xor(x, bit_xor(y, z)); }
  static I halved(I x) { return {_mm256_srli_epi32(x.a, 1), _mm256_srli_epi32(x.b, 1)}; }
  static F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
  static I multiply_low_halves(I x, I y) { return {_mm256_mul_epu32(x.a, y.a), _mm256_mul_epu32(x.b, y.b)}; }
  static I high_halves(I x) { return {_mm256_srli_epi64(x.a, 32), _mm256_srli_epi64(x.b, 32)}; }
  static I join_low_halves(I low, I high) {
    return {_mm256_blend_epi32(low.a, _mm256_slli_epi64(high.a, 32), 0xAA),
            _mm256_blend_epi32(low.b, _mm256_slli_epi64(high.b, 32), 0xAA)};
  }
  static I even_lanes(I x, I y) { return {_mm256_unpacklo_epi64(x.a, y.a), _mm256_unpacklo_epi64(x.b, y.b)}; }
  static I odd_lanes(I x, I y) { return {_mm256_unpackhi_epi64(x.a, y.a), _mm256_unpackhi_epi64(x.b, y.b)}; }
  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

 private:
  static __m128i half_load(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static void half_store(void* p, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
  static __m256i words(I x) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8); }
  static __m256i dot_words(__m256i acc, __m256i x, __m256i y) {
#ifdef __AVXVNNI__
    if constexpr (kVnni) return _mm256_dpwssd_avx_epi32(acc, x, y);
#endif
    return _mm256_add_epi32(acc, _mm256_madd_epi16(x, y));
  }
  static __m256 widen_bf16(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }
  static __m256 power(__m256 n) {  // 2^n
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  }
  static __m256i magnitude(__m256 x) { return _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), x)); }
  static uint32_t bits_of(__m256 a, __m256 b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(a)) | static_cast<uint32_t>(_mm256_movemask_ps(b)) << 8;
  }
  static I masked(I x, int byte) {
    const __m256i mask = _mm256_set1_epi8(static_cast<char>(byte));
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
  }
  static __m256i dot_register(__m256i acc, __m256i w, __m256i x) {
#ifdef __AVXVNNI__
    if constexpr (kVnni) return _mm256_dpbusd_avx_epi32(acc, w, x);
#endif
    return acc;  // never called
  }
};

}  // namespace paceline
