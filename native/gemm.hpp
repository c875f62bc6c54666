// Matrix products: one or two panels of 16 outputs times up to 16 rows.
//
// A row's result is one chain of operations over the groups of inputs in their order, the same for every number of rows
// and panels; rows only share the weights that are unpacked, panels the inputs that are loaded. Products within a group
// are integers, hence exact in any order. While one pair of panels is used the next is fetched, evenly over all rows.
#pragma once

#include "dot.hpp"
#include "kernels.hpp"

namespace paceline {
namespace {

constexpr size_t kNearBytes = 8192;  // far enough ahead where each weight is used once

constexpr int shift_of(int zero) { return zero == 128 ? 7 : zero == 32 ? 5 : 0; }

// What a block of rows fetches on its way through a pair of panels: its share of the groups of the next pair, since the
// blocks after the first find this pair's in the cache and would leave the memory idle.
struct Ahead {
  size_t bytes;  // from a group to that of the next pair
  size_t every;  // blocks of rows
  size_t turn;   // this one's number
};

// Adds a unit's groups to the totals of each panel and row; the panels' units lie stride bytes apart, x_* point at the
// unit's first group.
template <class V, Format kFormat, int kPanels, int kRows>
inline void add_unit(const uint8_t* scales, const uint8_t* quants, size_t stride, size_t groups, const Ahead& ahead,
                     const int8_t* x, const float* x_scales, const float* x_sums, const int32_t* x_negative,
                     typename V::F (*total)[kRows]) {
  using F = typename V::F;
  using I = typename V::I;
  constexpr FormatTraits kTrait = traits(kFormat);
  constexpr Scales kScales = kTrait.scales;
  constexpr size_t kBytes = quant_bytes(kTrait.quants);
  constexpr int kShift = shift_of(kTrait.zero);
  const auto halves = [&](int p, size_t offset) {
    return V::load_f16(reinterpret_cast<const uint16_t*>(scales + p * stride + offset));
  };
  F factor[kPanels] = {}, min_factor[kPanels] = {};
  for (int p = 0; p < kPanels; p++) {
    if constexpr (kScales == Scales::kSuper || kScales == Scales::kSuper16) factor[p] = halves(p, 0);
    if constexpr (kScales == Scales::kSuper) min_factor[p] = V::sub(V::zero(), halves(p, 32));
    if (ahead.turn == 0)
      for (size_t line = 0; line < scale_bytes(kScales); line += 64) V::prefetch(scales + p * stride + ahead.bytes + line);
  }
  for (size_t g = 0; g < groups; g++) {
    if (g % ahead.every == ahead.turn)
      for (int p = 0; p < kPanels; p++)
        for (size_t line = 0; line < kBytes; line += 64) V::prefetch(quants + p * stride + ahead.bytes + line);
    if constexpr (kScales == Scales::kSuper16) {
      F inner[kPanels][kRows];
      for (int half = 0; half < 2; half++) {
        I sums[kPanels][kRows];
        for (int r = 0; r < kRows; r++) {
          const I start = V::set1_shifted(x_negative + 2 * r + half, kShift);
          for (int p = 0; p < kPanels; p++) sums[p][r] = start;
        }
        if (half == 0) {
          dot<V, kTrait.quants, kPanels, kRows, 0, 1>(quants, stride, x, sums);
        } else {
          dot<V, kTrait.quants, kPanels, kRows, 1, 2>(quants, stride, x, sums);
        }
        for (int p = 0; p < kPanels; p++) {
          const int8_t* fine = reinterpret_cast<const int8_t*>(scales + p * stride) + 32 + (2 * g + half) * 16;
          const F scale = V::mul(factor[p], V::load_i8(fine));
          for (int r = 0; r < kRows; r++) {
            const F value = V::to_float(sums[p][r]);
            inner[p][r] = half == 0 ? V::mul(value, scale) : V::fma(value, scale, inner[p][r]);
          }
        }
      }
      for (int r = 0; r < kRows; r++) {
        const F x_scale = V::set1(x_scales[r]);
        for (int p = 0; p < kPanels; p++) total[p][r] = V::fma(inner[p][r], x_scale, total[p][r]);
      }
    } else {
      I sums[kPanels][kRows];
      for (int r = 0; r < kRows; r++) {
        I start = V::zero_i();
        if constexpr (kTrait.zero != 0)
          start = V::add_i(V::set1_shifted(x_negative + 2 * r, kShift), V::set1_shifted(x_negative + 2 * r + 1, kShift));
        for (int p = 0; p < kPanels; p++) sums[p][r] = start;
      }
      dot<V, kTrait.quants, kPanels, kRows, 0, 2>(quants, stride, x, sums);
      for (int p = 0; p < kPanels; p++) {
        if constexpr (kScales == Scales::kChannel) {
          for (int r = 0; r < kRows; r++) total[p][r] = V::fma(V::to_float(sums[p][r]), V::set1(x_scales[r]), total[p][r]);
          continue;
        }
        F scale, min = V::zero();
        if constexpr (kScales == Scales::kSuper) {
          const uint8_t* fine = scales + p * stride + 64 + g * 32;
          scale = V::mul(factor[p], V::load_u8(fine));
          min = V::mul(min_factor[p], V::load_u8(fine + 16));
        } else {
          scale = halves(p, g * 32);
          if constexpr (kScales == Scales::kHalfMin) min = halves(p, 32);
        }
        for (int r = 0; r < kRows; r++)
          total[p][r] = V::fma(V::to_float(sums[p][r]), V::mul(scale, V::set1(x_scales[r])), total[p][r]);
        if constexpr (kScales != Scales::kHalf)
          for (int r = 0; r < kRows; r++) total[p][r] = V::fma(V::set1(x_sums[r]), min, total[p][r]);
      }
    }
    quants += kBytes;
    x += kBlockRows * kGroup;
    x_scales += kBlockRows;
    x_sums += kBlockRows;
    x_negative += 2 * kBlockRows;
  }
}

template <class V, Format kFormat, int kPanels, int kRows>
inline void quantised_rows(const Matrix& w, int panel, const Activations& x, int row, Ahead ahead, float* tile) {
  constexpr FormatTraits kTrait = traits(kFormat);
  constexpr size_t kHeader = scale_bytes(kTrait.scales);
  const size_t groups = w.groups(), unit = kTrait.scales == Scales::kChannel ? groups : unit_groups(kTrait.scales);
  const size_t stride = kHeader + unit * quant_bytes(kTrait.quants);
  typename V::F total[kPanels][kRows];
  for (int p = 0; p < kPanels; p++)
    for (int r = 0; r < kRows; r++) total[p][r] = V::zero();
  const uint8_t *const start = w.data + w.panel_at(panel), *at = start;
  for (size_t g = 0; g < groups; g += unit) {
    const size_t first = (row / kBlockRows * x.groups + g) * kBlockRows;
    const Ahead turn{ahead.bytes, ahead.every, (ahead.turn + ahead.every - g % ahead.every) % ahead.every};
    add_unit<V, kFormat, kPanels, kRows>(at, at + kHeader, stride, unit, turn, x.quants + first * kGroup, x.scales + first,
                                         x.scaled_sums + first, x.negative_sums + 2 * first, total);
    at += 2 * stride;
  }
  for (int p = 0; p < kPanels; p++) {
    for (int r = 0; r < kRows; r++) {
      if constexpr (kTrait.scales == Scales::kChannel)
        total[p][r] = V::mul(total[p][r], V::load(reinterpret_cast<const float*>(start + p * stride)));
      V::store(tile + (p * kTileRows + r) * kLanes, total[p][r]);
    }
  }
}

template <class V, Format kFormat, int kPanels, int kRows>
inline void float_rows(const Matrix& w, int panel, const Activations& x, int row, float* tile) {
  using F = typename V::F;
  F total[kPanels][kRows];
  for (int p = 0; p < kPanels; p++)
    for (int r = 0; r < kRows; r++) total[p][r] = V::zero();
  const float* rows = x.values + row * x.stride;
  const uint8_t* start = w.data + w.panel_at(panel);
  for (int k = 0; k < w.inputs; k++) {
    F weights[kPanels];
    for (int p = 0; p < kPanels; p++) {
      const uint8_t* at = start + (2 * static_cast<size_t>(k) + p) * kLanes * traits(kFormat).element_bytes;
      if constexpr (kFormat == Format::kF32) weights[p] = V::load(reinterpret_cast<const float*>(at));
      if constexpr (kFormat == Format::kF16) weights[p] = V::load_f16(reinterpret_cast<const uint16_t*>(at));
      if constexpr (kFormat == Format::kBF16) weights[p] = V::load_bf16(reinterpret_cast<const uint16_t*>(at));
    }
    for (int r = 0; r < kRows; r++) {
      const F value = V::set1(rows[r * x.stride + k]);
      for (int p = 0; p < kPanels; p++) total[p][r] = V::fma(weights[p], value, total[p][r]);
    }
  }
  for (int p = 0; p < kPanels; p++)
    for (int r = 0; r < kRows; r++) V::store(tile + (p * kTileRows + r) * kLanes, total[p][r]);
}

template <class V, Format kFormat, int kPanels, int kRows>
inline void block(const Matrix& w, int panel, const Activations& x, int row, const Ahead& ahead, float* tile) {
  if constexpr (is_quantised(kFormat)) {
    quantised_rows<V, kFormat, kPanels, kRows>(w, panel, x, row, ahead, tile);
  } else {
    float_rows<V, kFormat, kPanels, kRows>(w, panel, x, row, tile);
  }
}

template <class V, Format kFormat, int kPanels>
inline void blocks(const Matrix& w, int panel, const Activations& x, int row0, int rows, float* tile) {
  const auto turns = static_cast<size_t>((rows + kBlockRows - 1) / kBlockRows);
  const size_t pair = 2 * w.panel_bytes();
  Ahead ahead{turns == 1 && pair > kNearBytes ? kNearBytes : pair, turns, 0};
  for (int r = 0; r < rows; r += kBlockRows, ahead.turn++) {
    float* out = tile + r * kLanes;
    switch (rows - r) {
      case 1: block<V, kFormat, kPanels, 1>(w, panel, x, row0 + r, ahead, out); break;
      case 2: block<V, kFormat, kPanels, 2>(w, panel, x, row0 + r, ahead, out); break;
      case 3: block<V, kFormat, kPanels, 3>(w, panel, x, row0 + r, ahead, out); break;
      default: block<V, kFormat, kPanels, 4>(w, panel, x, row0 + r, ahead, out); break;
    }
  }
}

template <class V, Format kFormat>
void tile(const Matrix& matrix, int panel, int panels, const Activations& x, int row0, int rows, float* out) {
  Matrix w = matrix;
  w.format = kFormat;  // known here: where its panels lie takes no divisions
  if (panels == 2 && (V::kManyRegisters || rows <= 2)) {
    blocks<V, kFormat, 2>(w, panel, x, row0, rows, out);
  } else {
    for (int p = 0; p < panels; p++) blocks<V, kFormat, 1>(w, panel + p, x, row0, rows, out + p * kTileRows * kLanes);
  }
  if (w.bias == nullptr) return;
  for (int p = 0; p < panels; p++) {
    const typename V::F bias = V::load(w.bias + static_cast<size_t>(panel + p) * kLanes);
    for (int r = 0; r < rows; r++) {
      float* at = out + (p * kTileRows + r) * kLanes;
      V::store(at, V::add(V::load(at), bias));
    }
  }
}

}  // namespace
}  // namespace paceline
