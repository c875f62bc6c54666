// Four bits for floats: a scale and a minimum for 32 inputs, fitted to them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "format.hpp"
#include "half.hpp"
#include "pack_panels.hpp"

namespace paceline {

using Four = float __attribute__((vector_size(16)));  // outputs, each by itself
using FourInts = int32_t __attribute__((vector_size(16)));

inline Four nearest_quant(Four position) {
  position = position < 0 ? Four{} : position;
  position = position > 15 ? Four{} + 15 : position;
  return __builtin_convertvector(__builtin_convertvector(position + 0.5f, FourInts), Four);
}

// Starts from several ranges and takes the quants whose least-squares line comes closest to w; an infinite scale where
// there is none, since w is not finite.
inline void fit_q4_1(const Four (&w)[kGroup], Four& best_scale, Four& best_min) {
  Four low = w[0], high = w[0], mean = {};
  for (const Four& x : w) {
    low = x < low ? x : low;
    high = x > high ? x : high;
    mean += x / kGroup;
  }
  Four best_gain = Four{} - 1;
  best_scale = Four{} + half_to_float(0x7c00);
  best_min = Four{};
  const Four range = high - low, middle = (low + high) * 0.5f;
  for (const float steps : {15.0f, 14.0f, 15.7f, 16.4f, 17.2f}) {  // of the range; more than 15 clip its ends
    const Four inverse = range > 1e-30f ? steps / range : Four{};
    Four sum_q = {}, sum_qq = {}, sum_qw = {};
    for (const Four& x : w) {
      const Four q = nearest_quant((x - middle) * inverse + 7.5f);
      sum_q += q;
      sum_qq += q * q;
      sum_qw += q * (x - mean);
    }
    const Four spread = sum_qq - sum_q * sum_q / kGroup;
    const Four scale = spread > 0 ? sum_qw / spread : Four{};
    const Four gain = scale * sum_qw;  // what the line explains of w's square sum
    const auto better = gain > best_gain;
    best_gain = better ? gain : best_gain;
    best_scale = better ? scale : best_scale;
    best_min = better ? mean - scale * sum_q / kGroup : best_min;
  }
}

inline bool pack_q4_1(const uint8_t* const* rows, int lanes, const Matrix& matrix, uint8_t* panel) {
  bool finite = true;
  for (int first = 0; first < lanes; first += 4) {
    const int filled = std::min(4, lanes - first);
    for (size_t group = 0; group < matrix.groups(); group++) {
      const int count = std::min<int>(kGroup, matrix.inputs - static_cast<int>(group) * kGroup);
      float row[4][kGroup] = {};
      for (int l = 0; l < filled; l++) {
        std::memcpy(row[l], rows[first + l] + group * sizeof(row[l]), count * sizeof(float));
      }
      Four w[kGroup], scale, min;
      for (int i = 0; i < kGroup; i++) w[i] = Four{row[0][i], row[1][i], row[2][i], row[3][i]};
      fit_q4_1(w, scale, min);

      ggml::Scales halves[4];
      for (int l = 0; l < 4; l++) {
        halves[l].d = float_to_half(scale[l]);
        halves[l].dmin = float_to_half(min[l]);
        scale[l] = half_to_float(halves[l].d);
        min[l] = half_to_float(halves[l].dmin);
      }
      const Four inverse = scale > 0 ? 1 / scale : Four{};
      uint8_t q[4][kGroup];
      for (int i = 0; i < kGroup; i++) {
        const Four nearest = nearest_quant((w[i] - min) * inverse);
        for (int l = 0; l < 4; l++) q[l][i] = static_cast<uint8_t>(nearest[l]);
      }
      for (int l = 0; l < filled; l++) {
        write_quants<Quants::kU4>(q[l], first + l, panel + matrix.quants_at(group));
        finite &= write_scales<Scales::kHalfMin>(halves[l], first + l, 0, panel + matrix.scales_at(group));
      }
    }
  }
  return finite;
}

}  // namespace paceline
