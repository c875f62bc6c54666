// Matrix products: one panel of 16 outputs times 1 to 8 rows.
//
// A row's result is one chain of operations over the groups of inputs in their order, the same for every number of
// rows; rows only share the weights that are unpacked. Products within a group are integers, hence exact in any order.
#pragma once

#include "kernels.hpp"

namespace paceline {
namespace {

constexpr size_t kPrefetchBytes = 2048;  // how far ahead of use weights are fetched

constexpr int shift_of(int zero) { return zero == 128 ? 7 : zero == 32 ? 5 : 0; }

// Adds the products of half a group (16 inputs) to the integer sums of each row; x points at the group [kTileRows, 32].
template <class V, Quants kQuants, int kRows>
inline void dot_half(const uint8_t* quants, int half, const int8_t* x, typename V::I* sums) {
  const int8_t* inputs = x + half * 16;
  if constexpr (kQuants == Quants::kU8) {
    for (int c = 0; c < 4; c++) {
      const typename V::I w = V::load_bytes(quants + (half * 4 + c) * 64);
      for (int r = 0; r < kRows; r++) sums[r] = V::template dot<true>(sums[r], w, inputs + r * kGroup + c * 4);
    }
  } else {
    const typename V::I first = V::load_bytes(quants + half * 128), second = V::load_bytes(quants + half * 128 + 64);
    typename V::I w[4] = {V::low_nibbles(first), V::high_nibbles(first), V::low_nibbles(second), V::high_nibbles(second)};
    if constexpr (kQuants == Quants::kU6) {
      const typename V::I plane = V::load_bytes(quants + 256 + half * 64);
      w[0] = V::template with_high_bits<0>(w[0], plane);
      w[1] = V::template with_high_bits<1>(w[1], plane);
      w[2] = V::template with_high_bits<2>(w[2], plane);
      w[3] = V::template with_high_bits<3>(w[3], plane);
    }
    for (int c = 0; c < 4; c++)
      for (int r = 0; r < kRows; r++) sums[r] = V::template dot<false>(sums[r], w[c], inputs + r * kGroup + c * 4);
  }
}

// The groups of one unit: scales, then quants. x_* point at the unit's first group.
template <class V, Format kFormat, int kRows>
inline void add_unit(const uint8_t* scales, const uint8_t* quants, size_t groups, const int8_t* x, const float* x_scales,
                     const float* x_sums, const int32_t* x_negative, typename V::F* total) {
  using F = typename V::F;
  using I = typename V::I;
  constexpr FormatTraits kTrait = traits(kFormat);
  constexpr size_t kBytes = quant_bytes(kTrait.quants);
  constexpr int kShift = shift_of(kTrait.zero);
  const auto halves = [&](size_t offset) { return V::load_f16(reinterpret_cast<const uint16_t*>(scales + offset)); };
  F factor = V::zero(), min_factor = V::zero();
  if constexpr (kTrait.scales == Scales::kSuper || kTrait.scales == Scales::kSuper16) factor = halves(0);
  if constexpr (kTrait.scales == Scales::kSuper) min_factor = V::sub(V::zero(), halves(32));
  for (size_t g = 0; g < groups; g++) {
    for (size_t line = 0; line < kBytes; line += 64) V::prefetch(quants + kPrefetchBytes + line);
    if constexpr (kTrait.scales == Scales::kSuper16) {
      F inner[kRows];
      for (int half = 0; half < 2; half++) {
        I sums[kRows];
        for (int r = 0; r < kRows; r++) sums[r] = V::set1_shifted(x_negative + 2 * r + half, kShift);
        dot_half<V, kTrait.quants, kRows>(quants, half, x, sums);
        const F scale = V::mul(factor, V::load_i8(reinterpret_cast<const int8_t*>(scales) + 32 + (2 * g + half) * 16));
        for (int r = 0; r < kRows; r++) {
          const F value = V::to_float(sums[r]);
          inner[r] = half == 0 ? V::mul(value, scale) : V::fma(value, scale, inner[r]);
        }
      }
      for (int r = 0; r < kRows; r++) total[r] = V::fma(inner[r], V::set1(x_scales[r]), total[r]);
    } else {
      I sums[kRows];
      for (int r = 0; r < kRows; r++) {
        sums[r] = V::zero_i();
        if constexpr (kTrait.zero != 0)
          sums[r] = V::add_i(V::set1_shifted(x_negative + 2 * r, kShift), V::set1_shifted(x_negative + 2 * r + 1, kShift));
      }
      dot_half<V, kTrait.quants, kRows>(quants, 0, x, sums);
      dot_half<V, kTrait.quants, kRows>(quants, 1, x, sums);
      if constexpr (kTrait.scales == Scales::kChannel) {
        for (int r = 0; r < kRows; r++) total[r] = V::fma(V::to_float(sums[r]), V::set1(x_scales[r]), total[r]);
      } else {
        F scale, min = V::zero();
        if constexpr (kTrait.scales == Scales::kSuper) {
          scale = V::mul(factor, V::load_u8(scales + 64 + g * 32));
          min = V::mul(min_factor, V::load_u8(scales + 80 + g * 32));
        } else {
          scale = halves(g * 32);
          if constexpr (kTrait.scales == Scales::kHalfMin) min = halves(32);
        }
        for (int r = 0; r < kRows; r++)
          total[r] = V::fma(V::to_float(sums[r]), V::mul(scale, V::set1(x_scales[r])), total[r]);
        if constexpr (kTrait.scales != Scales::kHalf)
          for (int r = 0; r < kRows; r++) total[r] = V::fma(V::set1(x_sums[r]), min, total[r]);
      }
    }
    quants += kBytes;
    x += kTileRows * kGroup;
    x_scales += kTileRows;
    x_sums += kTileRows;
    x_negative += 2 * kTileRows;
  }
}

template <class V, Format kFormat, int kRows>
inline void quantised_rows(const Matrix& w, const uint8_t* panel, const Activations& x, int row0, float* tile) {
  constexpr FormatTraits kTrait = traits(kFormat);
  constexpr size_t kHeader = scale_bytes(kTrait.scales);
  const size_t groups = w.groups(), unit = kTrait.scales == Scales::kChannel ? groups : unit_groups(kTrait.scales);
  const size_t first = row0 / kTileRows * x.groups;  // of the tile's groups
  typename V::F total[kRows];
  for (int r = 0; r < kRows; r++) total[r] = V::zero();
  const uint8_t* at = panel;
  for (size_t g = 0; g < groups; g += unit) {
    for (size_t line = 0; line < kHeader; line += 64) V::prefetch(at + kPrefetchBytes + line);
    const size_t row = (first + g) * kTileRows;
    add_unit<V, kFormat, kRows>(at, at + kHeader, unit, x.quants + row * kGroup, x.scales + row, x.scaled_sums + row,
                                x.negative_sums + 2 * row, total);
    at += kHeader + unit * quant_bytes(kTrait.quants);
  }
  for (int r = 0; r < kRows; r++) {
    if constexpr (kTrait.scales == Scales::kChannel)
      total[r] = V::mul(total[r], V::load(reinterpret_cast<const float*>(panel)));
    V::store(tile + r * kLanes, total[r]);
  }
}

template <class V, Format kFormat, int kRows>
inline void float_rows(const Matrix& w, const uint8_t* panel, const Activations& x, int row0, float* tile) {
  using F = typename V::F;
  F total[kRows];
  for (int r = 0; r < kRows; r++) total[r] = V::zero();
  const float* rows[kRows];
  for (int r = 0; r < kRows; r++) rows[r] = x.values + (row0 + r) * x.stride;
  for (int k = 0; k < w.inputs; k++) {
    const uint8_t* at = panel + static_cast<size_t>(k) * kLanes * traits(kFormat).element_bytes;
    F weights;
    if constexpr (kFormat == Format::kF32) weights = V::load(reinterpret_cast<const float*>(at));
    if constexpr (kFormat == Format::kF16) weights = V::load_f16(reinterpret_cast<const uint16_t*>(at));
    if constexpr (kFormat == Format::kBF16) weights = V::load_bf16(reinterpret_cast<const uint16_t*>(at));
    for (int r = 0; r < kRows; r++) total[r] = V::fma(weights, V::set1(rows[r][k]), total[r]);
  }
  for (int r = 0; r < kRows; r++) V::store(tile + r * kLanes, total[r]);
}

template <class V, Format kFormat, int kRows>
inline void rows_of(const Matrix& w, const uint8_t* panel, const Activations& x, int row0, float* tile) {
  if constexpr (is_quantised(kFormat)) {
    quantised_rows<V, kFormat, kRows>(w, panel, x, row0, tile);
  } else {
    float_rows<V, kFormat, kRows>(w, panel, x, row0, tile);
  }
}

template <class V, Format kFormat>
void tile(const Matrix& w, int panel, const Activations& x, int row0, int rows, float* out) {
  const uint8_t* at = w.panel(panel);
  switch (rows) {
    case 1: rows_of<V, kFormat, 1>(w, at, x, row0, out); break;
    case 2: rows_of<V, kFormat, 2>(w, at, x, row0, out); break;
    case 3: rows_of<V, kFormat, 3>(w, at, x, row0, out); break;
    case 4: rows_of<V, kFormat, 4>(w, at, x, row0, out); break;
    case 5: rows_of<V, kFormat, 5>(w, at, x, row0, out); break;
    case 6: rows_of<V, kFormat, 6>(w, at, x, row0, out); break;
    case 7: rows_of<V, kFormat, 7>(w, at, x, row0, out); break;
    default: rows_of<V, kFormat, 8>(w, at, x, row0, out); break;
  }
  if (w.bias == nullptr) return;
  const typename V::F bias = V::load(w.bias + static_cast<size_t>(panel) * kLanes);
  for (int r = 0; r < rows; r++) V::store(out + r * kLanes, V::add(V::load(out + r * kLanes), bias));
}

}  // namespace
}  // namespace paceline
