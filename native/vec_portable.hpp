// 16 lanes in plain C++: the reference of the vector kernels, and the engine of machines without one of theirs.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "half.hpp"

namespace paceline {

struct Portable {
  struct F {
    float lane[16];
  };
  struct I {
    int32_t lane[16];  // or 64 bytes
  };

  template <class Operation>
  static F each(Operation operation) {
    F result;
    for (int i = 0; i < 16; i++) result.lane[i] = operation(i);
    return result;
  }
  template <class Operation>
  static I each_i(Operation operation) {
    I result;
    for (int i = 0; i < 16; i++) result.lane[i] = operation(i);
    return result;
  }

  static constexpr bool kNarrow = false;         // no integer dot products that add in 32 bits
  static constexpr bool kManyRegisters = false;  // room for sums of two panels, or tiles of keys

  static F zero() { return set1(0.0f); }
  static F set1(float x) {
    return each([&](int) { return x; });
  }
  static F load(const float* p) {
    F result;
    std::memcpy(&result, p, sizeof result);
    return result;
  }
  static void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
  static F load_f16(const uint16_t* p) {
    return each([&](int i) { return half_to_float(p[i]); });
  }
  static F load_bf16(const uint16_t* p) {
    return each([&](int i) { return bfloat16_to_float(p[i]); });
  }
  static F load_i8(const int8_t* p) {
    return each([&](int i) { return static_cast<float>(p[i]); });
  }
  static F load_u8(const uint8_t* p) {
    return each([&](int i) { return static_cast<float>(p[i]); });
  }
  static void store_i8(int8_t* p, I x) {
    for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(x.lane[i]);
  }
  static void store_i16(int16_t* p, I x) {
    for (int i = 0; i < 16; i++) p[i] = static_cast<int16_t>(x.lane[i]);
  }

  static F add(F a, F b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static F sub(F a, F b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static F mul(F a, F b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static F div(F a, F b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  static F fma(F a, F b, F c) {  // two roundings: fmaf is a slow call where the processor has no instruction for it
    return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
  }
  static F max(F a, F b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static F min(F a, F b) {
    return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static F larger_magnitude(F a, F b) {
    return each([&](int i) { return std::bit_cast<float>(std::max(magnitude(a.lane[i]), magnitude(b.lane[i]))); });
  }
  static float largest_magnitude(F x) {
    uint32_t best = 0;
    for (float value : x.lane) best = std::max(best, magnitude(value));
    return std::bit_cast<float>(best);
  }
  static F round(F a) {
    return each([&](int i) { return std::nearbyint(a.lane[i]); });
  }
  static F zero_below(F x, F limit, F y) {
    return each([&](int i) { return x.lane[i] < limit.lane[i] ? 0.0f : y.lane[i]; });
  }
  static F scale_by_power(F x, F n) {
    return each([&](int i) {
      const uint32_t whole = std::bit_cast<uint32_t>(n.lane[i] + 0x1.8p23f);  // in its lower bits; NaN stays
      return x.lane[i] * std::bit_cast<float>((whole + 127) << 23);
    });
  }
  static float sum(F x) {  // pairs 8, 4, 2, 1 apart
    for (int width = 8; width > 0; width /= 2)
      for (int i = 0; i < width; i++) x.lane[i] += x.lane[i + width];
    return x.lane[0];
  }
  static float largest(F x) {
    float best = x.lane[0];
    for (float value : x.lane) best = value > best ? value : best;
    return best;
  }

  static I zero_i() {
    return each_i([](int) { return 0; });
  }
  static I set1_shifted(const int32_t* p, int shift) {
    return each_i([&](int) { return *p * (1 << shift); });
  }
  static I load_bytes(const uint8_t* p) {
    I result;
    std::memcpy(&result, p, sizeof result);
    return result;
  }
  static I low_nibbles(I x) {
    return each_i([&](int i) { return x.lane[i] & 0x0F0F0F0F; });
  }
  static I high_nibbles(I x) {
    return each_i([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(x.lane[i]) >> 4) & 0x0F0F0F0F; });
  }
  template <int i>
  static I with_high_bits(I nibbles, I plane) {
    return each_i([&](int lane) {
      const uint32_t bits = (static_cast<uint32_t>(plane.lane[lane]) >> (2 * i)) & 0x03030303u;
      return nibbles.lane[lane] | static_cast<int32_t>(bits << 4);
    });
  }
  static I set1_bytes(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return each_i([&](int) { return four; });
  }
  static I dot(I acc, I w, I x) {
    uint8_t unsigned_bytes[64];
    int8_t signed_bytes[64];
    std::memcpy(unsigned_bytes, &w, 64);
    std::memcpy(signed_bytes, &x, 64);
    for (int i = 0; i < 64; i++) acc.lane[i / 4] += static_cast<int32_t>(unsigned_bytes[i]) * signed_bytes[i];
    return acc;
  }
  static I load_pairs(const int16_t* p) { return load_bytes(reinterpret_cast<const uint8_t*>(p)); }
  static I load_pairs(const int8_t* p) {
    int16_t words[32];
    for (int i = 0; i < 32; i++) words[i] = p[i];
    return load_pairs(words);
  }
  static I dot_pairs(I acc, I a, I b) {
    int16_t x[32], y[32];
    std::memcpy(x, &a, 64);
    std::memcpy(y, &b, 64);
    for (int i = 0; i < 32; i++) acc.lane[i / 2] += x[i] * y[i];
    return acc;
  }
  static I add_i(I a, I b) {
    return each_i([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static F to_float(I x) {
    return each([&](int i) { return static_cast<float>(x.lane[i]); });
  }
  static I to_int(F x) {
    return each_i([&](int i) { return static_cast<int32_t>(std::nearbyint(x.lane[i])); });
  }
  static int32_t sum_i(I x) {
    int32_t total = 0;
    for (int32_t value : x.lane) total += value;
    return total;
  }

  template <class Condition>
  static uint32_t bits_of(Condition holds) {
    uint32_t bits = 0;
    for (int i = 0; i < 16; i++) bits |= static_cast<uint32_t>(holds(i)) << i;
    return bits;
  }
  static uint32_t gt(F a, F b) {
    return bits_of([&](int i) { return a.lane[i] > b.lane[i]; });
  }
  static uint32_t ge(F a, F b) {
    return bits_of([&](int i) { return a.lane[i] >= b.lane[i]; });
  }
  static uint32_t is_nan(F a) {
    return bits_of([&](int i) { return std::isnan(a.lane[i]); });
  }

  static I load_words(const uint32_t* p) { return load_bytes(reinterpret_cast<const uint8_t*>(p)); }
  static void store_words(uint32_t* p, I x) { std::memcpy(p, &x, sizeof x); }
  static I set1_word(uint32_t x) {
    return each_i([&](int) { return static_cast<int32_t>(x); });
  }
  static I bit_xor(I a, I b) {
    return each_i([&](int i) { return a.lane[i] ^ b.lane[i]; });
  }
  static I bit_xor(I a, I b, I c) { return bit_xor(a, bit_xor(b, c)); }
  static I halved(I x) {
    return each_i([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(x.lane[i]) >> 1); });
  }
  static F as_float(I x) {
    F result;
    std::memcpy(&result, &x, sizeof result);
    return result;
  }
  static I multiply_low_halves(I a, I b) {
    return each_i([&](int i) {
      const uint64_t product = uint64_t{static_cast<uint32_t>(a.lane[i & ~1])} * static_cast<uint32_t>(b.lane[i & ~1]);
      return static_cast<int32_t>(product >> (i & 1) * 32);
    });
  }
  static I high_halves(I x) {
    return each_i([&](int i) { return i & 1 ? 0 : x.lane[i + 1]; });
  }
  static I join_low_halves(I low, I high) {
    return each_i([&](int i) { return i & 1 ? high.lane[i - 1] : low.lane[i]; });
  }
  static I even_lanes(I a, I b) {
    return each_i([&](int i) { return (i & 2 ? b : a).lane[(i & ~3) + (i & 1)]; });
  }
  static I odd_lanes(I a, I b) {
    return each_i([&](int i) { return (i & 2 ? b : a).lane[(i & ~3) + 2 + (i & 1)]; });
  }
  static void prefetch(const void*) {}

 private:
  static uint32_t magnitude(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffff; }
};

}  // namespace paceline
