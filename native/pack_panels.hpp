// Panels of 16 outputs, written from rows of ggml blocks or floats. Layouts: format.hpp.
//
// A panel function takes the source rows of its lanes (16, or fewer in the last panel) and where its panel starts, in
// memory of zeros; it returns whether all values are finite.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "format.hpp"
#include "ggml_blocks.hpp"
#include "half.hpp"

namespace paceline {

using PanelFunction = bool (*)(const uint8_t* const* rows, int lanes, const Matrix& matrix, uint8_t* panel);

inline bool is_finite_half(uint16_t bits) { return (bits & 0x7c00) != 0x7c00; }

// One output's 32 quants into its lane of a group.
template <Quants kQuants>
inline void write_quants(const uint8_t* q, int lane, uint8_t* group) {
  uint32_t w[8];  // 4 quants each
  std::memcpy(w, q, 32);
  const auto store = [&](int chunk, uint32_t word) { std::memcpy(group + 64 * chunk + 4 * lane, &word, 4); };
  if constexpr (kQuants == Quants::kU8) {
    for (int c = 0; c < 8; c++) store(c, w[c]);
    return;
  }
  constexpr uint32_t kLow = 0x0f0f0f0f, kHigh = 0x03030303;
  for (int c = 0; c < 4; c++) store(c, (w[2 * c] & kLow) | (w[2 * c + 1] & kLow) << 4);
  if constexpr (kQuants == Quants::kU6) {
    for (int p = 0; p < 2; p++) {
      uint32_t word = 0;
      for (int i = 0; i < 4; i++) word |= (w[4 * p + i] >> 4 & kHigh) << (2 * i);
      store(4 + p, word);
    }
  }
}

// The scales of one output's block into its lane of a unit, `group` counted within it; false for those not finite.
template <Scales kScales>
inline bool write_scales(const ggml::Scales& s, int lane, size_t group, uint8_t* unit) {
  const auto store = [&](size_t offset, uint16_t half) { std::memcpy(unit + offset + 2 * lane, &half, 2); };
  bool finite = is_finite_half(s.d);
  if constexpr (kScales == Scales::kHalf) {
    store(32 * group, s.d);
  } else if constexpr (kScales == Scales::kHalfMin) {
    store(0, s.d);
    store(32, s.dmin);
    finite &= is_finite_half(s.dmin);
  } else if constexpr (kScales == Scales::kSuper) {
    store(0, s.d);
    store(32, s.dmin);
    finite &= is_finite_half(s.dmin);
    for (int g = 0; g < kSuperGroups; g++) {
      unit[64 + 32 * g + lane] = s.sc[g];
      unit[64 + 32 * g + 16 + lane] = s.mn[g];
    }
  } else {
    static_assert(kScales == Scales::kSuper16);
    store(0, s.d);
    for (int i = 0; i < 16; i++) unit[32 + 16 * i + lane] = s.sc[i];
  }
  return finite;
}

template <class Block>
bool pack_blocks(const uint8_t* const* rows, int lanes, const Matrix& matrix, uint8_t* panel) {
  constexpr FormatTraits kFormat = traits(Block::kFormat);
  constexpr size_t kGroups = Block::kInputs / kGroup;
  bool finite = true;
  for (int block = 0; block < matrix.inputs / Block::kInputs; block++) {
    const size_t first = block * kGroups;
    for (int lane = 0; lane < lanes; lane++) {
      uint8_t q[Block::kInputs];
      ggml::Scales scales;
      Block::quants(rows[lane] + static_cast<size_t>(block) * Block::kBytes, q);
      Block::scales(rows[lane] + static_cast<size_t>(block) * Block::kBytes, scales);
      for (size_t g = 0; g < kGroups; g++) {
        write_quants<kFormat.quants>(q + kGroup * g, lane, panel + matrix.quants_at(first + g));
      }
      finite &= write_scales<kFormat.scales>(scales, lane, first % unit_groups(kFormat.scales),
                                             panel + matrix.scales_at(first));
    }
  }
  return finite;
}

inline bool pack_q2_k(const uint8_t* const* rows, int lanes, const Matrix& matrix, uint8_t* panel) {
  using Block = ggml::Q2_K;
  float w[Block::kInputs];
  bool finite = true;
  for (int block = 0; block < matrix.inputs / Block::kInputs; block++) {
    for (int lane = 0; lane < lanes; lane++) {
      const uint8_t* bytes = rows[lane] + static_cast<size_t>(block) * Block::kBytes;
      finite &= is_finite_half(ggml::half_at(bytes + 80)) && is_finite_half(ggml::half_at(bytes + 82));
      Block::values(bytes, w);
      for (int i = 0; i < Block::kInputs; i++) {
        std::memcpy(panel + matrix.input_at(block * Block::kInputs + i) + lane * sizeof(float), w + i, sizeof(float));
      }
    }
  }
  return finite;
}

// Elements as they are, f32, f16 or bf16 by their bits; kExponent is what NaN and infinity have in full.
template <class Bits, Bits kExponent>
bool pack_elements(const uint8_t* const* rows, int lanes, const Matrix& matrix, uint8_t* panel) {
  bool finite = true;
  for (int k = 0; k < matrix.inputs; k++) {
    Bits column[kLanes] = {};
    for (int lane = 0; lane < lanes; lane++) {
      std::memcpy(column + lane, rows[lane] + k * sizeof(Bits), sizeof(Bits));
      finite &= (column[lane] & kExponent) != kExponent;
    }
    std::memcpy(panel + matrix.input_at(k), column, sizeof(column));
  }
  return finite;
}

template <uint16_t (*kRound)(float)>
bool pack_rounded(const uint8_t* const* rows, int lanes, const Matrix& matrix, uint8_t* panel) {
  constexpr uint16_t kExponent = kRound == float_to_half ? 0x7c00 : 0x7f80;
  bool finite = true;
  for (int k = 0; k < matrix.inputs; k++) {
    uint16_t column[kLanes] = {};
    for (int lane = 0; lane < lanes; lane++) {
      float value;
      std::memcpy(&value, rows[lane] + k * sizeof(float), sizeof(float));
      column[lane] = value == value ? kRound(value) : kExponent;
      finite &= (column[lane] & kExponent) != kExponent;
    }
    std::memcpy(panel + matrix.input_at(k), column, sizeof(column));
  }
  return finite;
}

// Symmetric, one scale for each output: the largest magnitude becomes 127.
inline bool pack_i8(const uint8_t* const* rows, int lanes, const Matrix& matrix, uint8_t* panel) {
  bool finite = true;
  for (int lane = 0; lane < lanes; lane++) {
    const float* row = reinterpret_cast<const float*>(rows[lane]);
    uint32_t largest = 0;  // as bits, where NaN and infinity are larger than numbers
    for (int k = 0; k < matrix.inputs; k++) largest = std::max(largest, std::bit_cast<uint32_t>(row[k]) & 0x7fffffff);
    finite &= largest < 0x7f800000;
    const float scale = std::bit_cast<float>(largest) / 127;
    const float inverse = scale > 1e-36f ? 1 / scale : 0;
    for (size_t group = 0; group < matrix.groups(); group++) {
      uint8_t q[kGroup];
      const int count = std::min<int>(kGroup, matrix.inputs - static_cast<int>(group) * kGroup);
      std::fill_n(q, kGroup, uint8_t{128});
      for (int i = 0; i < count && finite; i++) {
        q[i] = static_cast<uint8_t>(static_cast<int>(row[group * kGroup + i] * inverse + 128.5f));
      }
      write_quants<Quants::kU8>(q, lane, panel + matrix.quants_at(group));
    }
    std::memcpy(panel + lane * sizeof(float), &scale, sizeof(float));
  }
  return finite;
}

}  // namespace paceline
