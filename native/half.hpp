// float16 and bfloat16 by their bits, for code that runs on any machine; the vector kernels have their own.
// Static: a file that is compiled for newer machines may include this too, and its copies must not serve the others.
#pragma once

#include <bit>
#include <cstdint>

namespace paceline {

static inline float half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t rest = static_cast<uint32_t>(bits & 0x7fff) << 13;
  if (rest >= 0x7c00u << 13) return std::bit_cast<float>(sign | rest | 0x7f800000);  // infinity, NaN
  const float scaled = std::bit_cast<float>(rest) * 0x1p112f;  // moves the exponent's bias; subnormals come out right
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(scaled));
}

// Rounds to nearest, ties to even.
static inline uint16_t float_to_half(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (rest >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // beyond 65519.99: infinity
  if (rest < 0x38800000) {  // subnormal: the addition rounds at 2^-24
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(rest) + 0.5f) & 0x7ff));
  }
  return static_cast<uint16_t>(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
}

static inline float bfloat16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Rounds to nearest, ties to even; for finite values.
static inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace paceline
