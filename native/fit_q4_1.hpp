// Four bits for floats: a scale and a minimum for 32 inputs, fitted to them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "format.hpp"
#include "half.hpp"
#include "pack_panels.hpp"

namespace paceline {

inline float nearest_quant(float position) {
  return static_cast<float>(static_cast<int>(std::clamp(position, 0.0f, 15.0f) + 0.5f));
}

// Scale and minimum for 32 inputs of 16 outputs at once, each output by itself: starts from several ranges, refits scale
// and minimum to the quants by least squares and keeps the pair with the smallest squared error.
inline void fit_q4_1(const float (&w)[kGroup][kLanes], uint16_t (&best_scale)[kLanes], uint16_t (&best_min)[kLanes]) {
  float low[kLanes], high[kLanes], best_error[kLanes];
  std::copy_n(w[0], kLanes, low);
  std::copy_n(w[0], kLanes, high);
  for (const auto& row : w) {
    for (int l = 0; l < kLanes; ++l) low[l] = row[l] < low[l] ? row[l] : low[l];
    for (int l = 0; l < kLanes; ++l) high[l] = row[l] > high[l] ? row[l] : high[l];
  }
  std::fill_n(best_error, kLanes, INFINITY);
  std::fill_n(best_scale, kLanes, uint16_t{0x7c00});  // stays where nothing fits: infinity
  std::fill_n(best_min, kLanes, uint16_t{0});
  for (const float steps : {15.0f, 14.0f, 15.7f, 16.4f, 17.2f}) {  // 15 = the whole range; more clips its ends
    float scale[kLanes], min[kLanes], inverse[kLanes], sum_q[kLanes] = {}, sum_qq[kLanes] = {}, sum_w[kLanes] = {},
                                                        sum_qw[kLanes] = {}, error[kLanes] = {};
    for (int l = 0; l < kLanes; ++l) {
      const float range = high[l] - low[l];
      inverse[l] = range > 1e-30f ? steps / range : 0;
      min[l] = 0.5f * (low[l] + high[l] - range * (15 / steps));
    }
    for (const auto& row : w) {
      for (int l = 0; l < kLanes; ++l) {
        const float q = nearest_quant((row[l] - min[l]) * inverse[l]);
        sum_q[l] += q;
        sum_qq[l] += q * q;
        sum_w[l] += row[l];
        sum_qw[l] += q * row[l];
      }
    }
    for (int l = 0; l < kLanes; ++l) {
      const float spread = kGroup * sum_qq[l] - sum_q[l] * sum_q[l];
      const float fitted = spread > 0 ? (kGroup * sum_qw[l] - sum_q[l] * sum_w[l]) / spread : 0;
      scale[l] = half_to_float(float_to_half(fitted));
      min[l] = half_to_float(float_to_half((sum_w[l] - scale[l] * sum_q[l]) / kGroup));
      inverse[l] = scale[l] > 0 ? 1 / scale[l] : 0;
    }
    for (const auto& row : w) {
      for (int l = 0; l < kLanes; ++l) {
        const float miss = scale[l] * nearest_quant((row[l] - min[l]) * inverse[l]) + min[l] - row[l];
        error[l] += miss * miss;
      }
    }
    for (int l = 0; l < kLanes; ++l) {
      if (!(error[l] < best_error[l])) continue;
      best_error[l] = error[l];
      best_scale[l] = float_to_half(scale[l]);
      best_min[l] = float_to_half(min[l]);
    }
  }
}

inline bool pack_q4_1(const uint8_t* const* rows, int lanes, const Matrix& matrix, uint8_t* panel) {
  bool finite = true;
  for (size_t group = 0; group < matrix.groups(); ++group) {
    float w[kGroup][kLanes] = {};
    const int count = std::min<int>(kGroup, matrix.inputs - static_cast<int>(group) * kGroup);
    for (int lane = 0; lane < lanes; ++lane) {
      float row[kGroup];
      std::memcpy(row, rows[lane] + group * sizeof(row), count * sizeof(float));
      for (int i = 0; i < count; ++i) w[i][lane] = row[i];
    }
    uint16_t scale[kLanes], min[kLanes];
    fit_q4_1(w, scale, min);
    for (int lane = 0; lane < lanes; ++lane) {
      const float factor = half_to_float(scale[lane]), start = half_to_float(min[lane]);
      uint8_t q[kGroup];
      for (int i = 0; i < kGroup; ++i) {
        q[i] = static_cast<uint8_t>(nearest_quant(factor > 0 ? (w[i][lane] - start) * (1 / factor) : 0));
      }
      write_quants<Quants::kU4>(q, lane, panel + group * quant_bytes(Quants::kU4));
      const ggml::Scales scales{.d = scale[lane], .dmin = min[lane]};
      finite &= write_scales<Scales::kHalfMin>(scales, lane, group, panel + matrix.scales_offset());
    }
  }
  return finite;
}

}  // namespace paceline
