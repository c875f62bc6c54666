// The blocks of GGUF's tensor types, taken apart: quants as bytes in the order of the inputs, scales as stored.
//
// Each struct names the packed format that holds its values exactly, the inputs and bytes of a block, and reads one.
// Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
#pragma once

#include <cstdint>
#include <cstring>

#include "format.hpp"
#include "half.hpp"

namespace paceline::ggml {

struct Scales {
  uint16_t d = 0, dmin = 0;  // f16: factor, and minimum (of 32) or the factor of the minimums (of 256)
  uint8_t sc[16] = {};       // by 32 inputs, or 16 where the format's scales are
  uint8_t mn[8] = {};        // by 32 inputs
};

inline uint16_t half_at(const uint8_t* bytes) {
  uint16_t bits;
  std::memcpy(&bits, bytes, 2);
  return bits;
}

inline uint16_t scaled_half(uint16_t half, float factor) { return float_to_half(half_to_float(half) * factor); }

inline void split_nibbles(const uint8_t* bytes, int count, uint8_t* q) {  // low nibbles first
  for (int i = 0; i < count; i++) q[i] = bytes[i] & 15;
  for (int i = 0; i < count; i++) q[count + i] = bytes[i] >> 4;
}

inline void add_fifth_bits(const uint8_t* bytes, uint8_t* q) {  // of 32 quants, a bit each
  for (int i = 0; i < 4; i++) {  // eight at once: byte j keeps bit j of its copy, any bit there carries into bit 7
    constexpr uint64_t kOnes = 0x0101010101010101;
    const uint64_t bits = bytes[i] * kOnes & 0x8040201008040201;
    uint64_t quants;
    std::memcpy(&quants, q + 8 * i, 8);
    quants |= ((bits + 0x7f * kOnes) & 0x80 * kOnes) >> 3;
    std::memcpy(q + 8 * i, &quants, 8);
  }
}

struct Q4_0 {
  static constexpr Format kFormat = Format::kQ4_1;
  static constexpr int kInputs = 32, kBytes = 18;
  static void quants(const uint8_t* block, uint8_t* q) { split_nibbles(block + 2, 16, q); }
  static void scales(const uint8_t* block, Scales& s) {
    s.d = half_at(block);
    s.dmin = scaled_half(s.d, -8);
  }
};

struct Q4_1 {
  static constexpr Format kFormat = Format::kQ4_1;
  static constexpr int kInputs = 32, kBytes = 20;
  static void quants(const uint8_t* block, uint8_t* q) { split_nibbles(block + 4, 16, q); }
  static void scales(const uint8_t* block, Scales& s) {
    s.d = half_at(block);
    s.dmin = half_at(block + 2);
  }
};

struct Q5_0 {
  static constexpr Format kFormat = Format::kQ5_1;
  static constexpr int kInputs = 32, kBytes = 22;
  static void quants(const uint8_t* block, uint8_t* q) {
    split_nibbles(block + 6, 16, q);
    add_fifth_bits(block + 2, q);
  }
  static void scales(const uint8_t* block, Scales& s) {
    s.d = half_at(block);
    s.dmin = scaled_half(s.d, -16);
  }
};

struct Q5_1 {
  static constexpr Format kFormat = Format::kQ5_1;
  static constexpr int kInputs = 32, kBytes = 24;
  static void quants(const uint8_t* block, uint8_t* q) {
    split_nibbles(block + 8, 16, q);
    add_fifth_bits(block + 4, q);
  }
  static void scales(const uint8_t* block, Scales& s) { Q4_1::scales(block, s); }
};

struct Q8_0 {
  static constexpr Format kFormat = Format::kQ8_0;
  static constexpr int kInputs = 32, kBytes = 34;
  static void quants(const uint8_t* block, uint8_t* q) {
    for (int i = 0; i < 32; i++) q[i] = block[2 + i] ^ 0x80;
  }
  static void scales(const uint8_t* block, Scales& s) { s.d = half_at(block); }
};

struct Q4_K {
  static constexpr Format kFormat = Format::kQ4_K;
  static constexpr int kInputs = 256, kBytes = 144;
  static void quants(const uint8_t* block, uint8_t* q) {
    for (int i = 0; i < 4; i++) split_nibbles(block + 16 + 32 * i, 32, q + 64 * i);
  }
  static void scales(const uint8_t* block, Scales& s) {
    s.d = half_at(block);
    s.dmin = half_at(block + 2);
    const uint8_t* bits = block + 4;  // 6 bits each: the last four scales and minimums are spread over the others
    for (int i = 0; i < 4; i++) {
      s.sc[i] = bits[i] & 63;
      s.mn[i] = bits[4 + i] & 63;
      s.sc[4 + i] = (bits[8 + i] & 15) | (bits[i] >> 6 << 4);
      s.mn[4 + i] = bits[8 + i] >> 4 | (bits[4 + i] >> 6 << 4);
    }
  }
};

struct Q5_K {
  static constexpr Format kFormat = Format::kQ5_K;
  static constexpr int kInputs = 256, kBytes = 176;
  static void quants(const uint8_t* block, uint8_t* q) {
    for (int i = 0; i < 4; i++) split_nibbles(block + 48 + 32 * i, 32, q + 64 * i);
    for (int g = 0; g < 8; g++) {
      for (int i = 0; i < 32; i++) q[32 * g + i] |= (block[16 + i] >> g & 1) << 4;
    }
  }
  static void scales(const uint8_t* block, Scales& s) { Q4_K::scales(block, s); }
};

struct Q6_K {
  static constexpr Format kFormat = Format::kQ6_K;
  static constexpr int kInputs = 256, kBytes = 210;
  static void quants(const uint8_t* block, uint8_t* q) {
    for (int half = 0; half < 2; half++) split_nibbles(block + 64 * half, 64, q + 128 * half);
    for (int g = 0; g < 8; g++) {
      const uint8_t* high = block + 128 + 32 * (g / 4);
      for (int i = 0; i < 32; i++) q[32 * g + i] |= (high[i] >> (2 * (g % 4)) & 3) << 4;
    }
  }
  static void scales(const uint8_t* block, Scales& s) {
    s.d = half_at(block + 208);
    std::memcpy(s.sc, block + 192, 16);
  }
};

struct Q3_K {
  static constexpr Format kFormat = Format::kQ6_K;  // of which it is a coarser case: -4..3 and signed scales
  static constexpr int kInputs = 256, kBytes = 110;
  static void quants(const uint8_t* block, uint8_t* q) {
    for (int g = 0; g < 8; g++) {
      const uint8_t* low = block + 32 + 32 * (g / 4);
      for (int i = 0; i < 32; i++) {
        q[32 * g + i] = 28 + (low[i] >> (2 * (g % 4)) & 3) + ((block[i] >> g & 1) << 2);
      }
    }
  }
  static void scales(const uint8_t* block, Scales& s) {
    s.d = half_at(block + 108);
    const uint8_t* bits = block + 96;
    for (int i = 0; i < 16; i++) {
      s.sc[i] = ((bits[i % 8] >> (4 * (i / 8)) & 15) | (bits[8 + i % 4] >> (2 * (i / 4)) & 3) << 4) - 32;
    }
  }
};

struct Q2_K {  // unpacked to floats: a minimum of each 16 inputs has no place in the other formats
  static constexpr Format kFormat = Format::kF32;
  static constexpr int kInputs = 256, kBytes = 84;
  static void values(const uint8_t* block, float* w) {
    const float d = half_to_float(half_at(block + 80)), dmin = half_to_float(half_at(block + 82));
    for (int part = 0; part < 16; part++) {  // of 16 inputs
      const float scale = d * static_cast<float>(block[part] & 15), min = dmin * static_cast<float>(block[part] >> 4);
      const uint8_t* low = block + 16 + 32 * (part / 8) + 16 * (part % 2);
      for (int i = 0; i < 16; i++) {
        w[16 * part + i] = scale * static_cast<float>(low[i] >> (2 * (part / 2 % 4)) & 3) - min;
      }
    }
  }
};

}  // namespace paceline::ggml
