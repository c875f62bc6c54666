// What happens to rows between the matrix products.
#pragma once

#include <cmath>

#include "kernels.hpp"

namespace paceline {
namespace {

// exp in float32, within 2 ulp; 0 below -87.3; NaN of NaN, by the order of the bounds. Cephes' polynomial on
// [-ln 2 / 2, ln 2 / 2].
template <class V>
inline typename V::F exp_of(typename V::F x) {
  using F = typename V::F;
  const F lowest = V::set1(-87.3f);
  const F bounded = V::max(lowest, V::min(V::set1(88.3f), x));
  const F n = V::round(V::mul(bounded, V::set1(1.44269504f)));
  F r = V::fma(n, V::set1(-0.693359375f), bounded);
  r = V::fma(n, V::set1(2.12194440e-4f), r);
  F p = V::set1(1.9875691500e-4f);
  p = V::fma(p, r, V::set1(1.3981999507e-3f));
  p = V::fma(p, r, V::set1(8.3334519073e-3f));
  p = V::fma(p, r, V::set1(4.1665795894e-2f));
  p = V::fma(p, r, V::set1(1.6666665459e-1f));
  p = V::fma(p, r, V::set1(5.0000001201e-1f));
  p = V::add(V::fma(V::mul(r, r), p, r), V::set1(1.0f));
  return V::zero_below(x, lowest, V::scale_by_power(p, n));
}

template <class V>
inline typename V::F tanh_of(typename V::F x) {  // 1 - 2 / (exp(2x) + 1)
  const typename V::F e = exp_of<V>(V::add(x, x));
  return V::sub(V::set1(1.0f), V::div(V::set1(2.0f), V::add(e, V::set1(1.0f))));
}

template <class V>
void rms_norm(const float* x, const float* gain, int n, float eps, float* y) {
  typename V::F squares = V::zero();
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const typename V::F v = V::load(x + i);
    squares = V::fma(v, v, squares);
  }
  float total = V::sum(squares);
  for (int rest = i; rest < n; rest++) total += x[rest] * x[rest];
  const float factor = 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
  for (i = 0; i + kLanes <= n; i += kLanes)
    V::store(y + i, V::mul(V::mul(V::load(x + i), V::set1(factor)), V::load(gain + i)));
  for (; i < n; i++) y[i] = x[i] * factor * gain[i];
}

template <class V>
void add(const float* x, int n, float* y) {
  for (int i = 0; i < n; i += kLanes) V::store(y + i, V::add(V::load(y + i), V::load(x + i)));
}

// How values become integers. Of what is not finite the scale tells, the integers are zeros.
struct Rounding {
  float scale, inverse;
};

inline Rounding rounding(float magnitude, float limit) {  // by which the magnitude becomes the limit
  const bool invertible = magnitude > 1e-36f && magnitude < __builtin_inff();
  return {magnitude / limit, invertible ? limit / magnitude : 0.0f};
}

template <class V>
inline Rounding round_largest(const float* x, int n, float limit) {  // n is a multiple of 16
  typename V::F largest = V::zero();
  for (int i = 0; i < n; i += kLanes) largest = V::larger_magnitude(largest, V::load(x + i));
  return rounding(V::largest_magnitude(largest), limit);
}

template <class V>
inline typename V::I to_integers(typename V::F x, const Rounding& by) {
  return by.inverse > 0 ? V::to_int(V::mul(x, V::set1(by.inverse))) : V::zero_i();
}

// x is padded with zeros to whole groups.
template <class V>
void quantise(const float* x, int n, const QuantisedRow& row) {
  for (int k = 0; k < n; k += kGroup) {
    const Rounding by = round_largest<V>(x + k, kGroup, 127);
    const typename V::I a = to_integers<V>(V::load(x + k), by), b = to_integers<V>(V::load(x + k + kLanes), by);
    const size_t at = static_cast<size_t>(k / kGroup) * kBlockRows;
    V::store_i8(row.quants + at * kGroup, a);
    V::store_i8(row.quants + at * kGroup + kLanes, b);
    const int32_t sum_a = V::sum_i(a), sum_b = V::sum_i(b);
    row.scales[at] = by.scale;
    row.scaled_sums[at] = by.scale * static_cast<float>(sum_a + sum_b);
    row.negative_sums[2 * at] = -sum_a;
    row.negative_sums[2 * at + 1] = -sum_b;
  }
}

// Rotates the pairs (i, i + half) of one head.
template <class V>
void rotate(float* head, const float* cosines, const float* sines, int half) {
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const typename V::F a = V::load(head + i), b = V::load(head + half + i);
    const typename V::F c = V::load(cosines + i), s = V::load(sines + i);
    V::store(head + i, V::sub(V::mul(a, c), V::mul(b, s)));
    V::store(head + half + i, V::add(V::mul(b, c), V::mul(a, s)));
  }
  for (; i < half; i++) {
    const float a = head[i], b = head[half + i];
    head[i] = a * cosines[i] - b * sines[i];
    head[half + i] = b * cosines[i] + a * sines[i];
  }
}

template <class V>
void gate(const float* gate, const float* up, int n, bool gelu, float* y) {
  using F = typename V::F;
  const F one = V::set1(1.0f);
  for (int i = 0; i < n; i += kLanes) {
    const F x = V::load(gate + i);
    F slope = x;
    if (gelu) {  // the tanh form of GELU is x * sigmoid(2 u)
      const F cubic = V::fma(V::mul(V::mul(x, x), x), V::set1(0.044715f), x);
      slope = V::mul(cubic, V::set1(2.0f * 0.7978845608f));
    }
    const F activated = V::div(x, V::add(one, exp_of<V>(V::sub(V::zero(), slope))));
    V::store(y + i, V::mul(activated, V::load(up + i)));
  }
}

template <class V>
void softcap(float* x, int n, float cap) {
  for (int i = 0; i < n; i += kLanes)
    V::store(x + i, V::mul(tanh_of<V>(V::div(V::load(x + i), V::set1(cap))), V::set1(cap)));
}

}  // namespace
}  // namespace paceline
