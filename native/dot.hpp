// Integer products of a group of inputs: quants of 16 outputs times the int8 inputs of some rows, added in 32 bits.
//
// Integers are exact in any order, so each instruction set takes the one that suits it.
#pragma once

#include "kernels.hpp"

namespace paceline {
namespace {

// Adds the products of half a group (16 inputs) to the integer sums of each row; x points at the group [kBlockRows, 32].
template <class V, Quants kQuants, int kPanels, int kRows>
inline void dot_half(const uint8_t* quants, size_t stride, int half, const int8_t* x, typename V::I (*sums)[kRows]) {
  using I = typename V::I;
  const int8_t* inputs = x + half * 16;
  I w[kPanels][4];
  for (int p = 0; p < kPanels; p++) {
    const uint8_t* at = quants + p * stride;
    if constexpr (kQuants == Quants::kU8) {
      for (int c = 0; c < 4; c++) w[p][c] = V::load_bytes(at + (half * 4 + c) * 64);
    } else {
      const I first = V::load_bytes(at + half * 128), second = V::load_bytes(at + half * 128 + 64);
      w[p][0] = V::low_nibbles(first);
      w[p][1] = V::high_nibbles(first);
      w[p][2] = V::low_nibbles(second);
      w[p][3] = V::high_nibbles(second);
      if constexpr (kQuants == Quants::kU6) {
        const I plane = V::load_bytes(at + 256 + half * 64);
        w[p][0] = V::template with_high_bits<0>(w[p][0], plane);
        w[p][1] = V::template with_high_bits<1>(w[p][1], plane);
        w[p][2] = V::template with_high_bits<2>(w[p][2], plane);
        w[p][3] = V::template with_high_bits<3>(w[p][3], plane);
      }
    }
  }
  for (int c = 0; c < 4; c++) {
    for (int r = 0; r < kRows; r++) {
      const I four = V::set1_bytes(inputs + r * kGroup + c * 4);
      for (int p = 0; p < kPanels; p++)
        sums[p][r] = V::dot(sums[p][r], w[p][c], four);
    }
  }
}

enum class Part : uint8_t { kAll, kLow, kHigh };  // of 8-bit quants one half of their bits

// The c-th four inputs of a group, for each output.
template <class V, Quants kQuants, Part kPart>
inline typename V::I weights(const uint8_t* quants, int c) {
  using I = typename V::I;
  const I bytes = V::load_bytes(quants + (kQuants == Quants::kU8 ? c : c / 2) * 64);
  if constexpr (kPart != Part::kAll) return kPart == Part::kLow ? V::low_nibbles(bytes) : V::high_nibbles(bytes);
  const I nibbles = c % 2 == 0 ? V::low_nibbles(bytes) : V::high_nibbles(bytes);
  if constexpr (kQuants == Quants::kU4) return nibbles;
  const I plane = V::load_bytes(quants + 256 + c / 4 * 64);
  switch (c % 4) {
    case 0: return V::template with_high_bits<0>(nibbles, plane);
    case 1: return V::template with_high_bits<1>(nibbles, plane);
    case 2: return V::template with_high_bits<2>(nibbles, plane);
    default: return V::template with_high_bits<3>(nibbles, plane);
  }
}

// Without an instruction that adds products in 32 bits (V::kNarrow): sums of two products are added in 16 bits for as long
// as they fit, which is 32 products of 4-bit quants but only 4 of 6-bit ones. 8-bit quants go as two halves of 4 bits.
template <class V, Quants kQuants, Part kPart, int kRows, int kBegin, int kEnd>
inline void dot_narrow(const uint8_t* quants, const int8_t* x, typename V::I (&sums)[kRows]) {
  using I = typename V::I;
  constexpr int kFirst = 4 * kBegin, kLast = 4 * kEnd, kTogether = kQuants == Quants::kU6 ? 2 : kLast - kFirst;
  I pairs[kRows];
#pragma GCC unroll 8
  for (int c = kFirst; c < kLast; c++) {
    const I w = weights<V, kQuants, kPart>(quants, c);
    for (int r = 0; r < kRows; r++) {
      const I products = V::pair_products(w, V::set1_bytes(x + r * kGroup + c * 4));
      pairs[r] = c % kTogether == 0 ? products : V::add_pairs(pairs[r], products);
    }
    if (c % kTogether == kTogether - 1)
      for (int r = 0; r < kRows; r++) sums[r] = V::add_widened(sums[r], pairs[r], kPart == Part::kHigh ? 16 : 1);
  }
}

// Adds the products of the halves [kBegin, kEnd) of a group to the integer sums of each panel and row.
template <class V, Quants kQuants, int kPanels, int kRows, int kBegin, int kEnd>
inline void dot(const uint8_t* quants, size_t stride, const int8_t* x, typename V::I (*sums)[kRows]) {
  if constexpr (V::kNarrow) {
    for (int p = 0; p < kPanels; p++, quants += stride) {
      if constexpr (kQuants == Quants::kU8) {
        dot_narrow<V, kQuants, Part::kLow, kRows, kBegin, kEnd>(quants, x, sums[p]);
        dot_narrow<V, kQuants, Part::kHigh, kRows, kBegin, kEnd>(quants, x, sums[p]);
      } else {
        dot_narrow<V, kQuants, Part::kAll, kRows, kBegin, kEnd>(quants, x, sums[p]);
      }
    }
  } else {
    for (int half = kBegin; half < kEnd; half++) dot_half<V, kQuants, kPanels, kRows>(quants, stride, half, x, sums);
  }
}

}  // namespace
}  // namespace paceline
