// float32 rows and what quantised weights read of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "array.hpp"
#include "kernels.hpp"

namespace paceline {

inline size_t padded(size_t size, size_t multiple) { return (size + multiple - 1) / multiple * multiple; }

class Rows {
 public:
  explicit Rows(int width);
  void reserve(int count);
  float* row(int index) { return values_.data() + index * stride_; }
  void quantise(const Kernels& kernels, int index) { quantise(kernels, index, 0, width_); }
  void quantise(const Kernels& kernels, int index, int first, int count);  // whole groups
  Activations view() const;

 private:
  int width_;
  size_t stride_, groups_;
  Array<float> values_, scales_, scaled_sums_;
  Array<int8_t> quants_;
  Array<int32_t> negative_sums_;
};

inline Rows::Rows(int width) : width_(width), stride_(padded(width, kGroup)), groups_(padded(width, 256) / kGroup) {}

inline void Rows::reserve(int count) {
  values_.reserve(count * stride_);
  const size_t tiled = padded(count, kBlockRows) * groups_;
  quants_.reserve(tiled * kGroup);
  scales_.reserve(tiled);
  scaled_sums_.reserve(tiled);
  negative_sums_.reserve(tiled * 2);
}

inline void Rows::quantise(const Kernels& kernels, int index, int first, int count) {
  const size_t group = static_cast<size_t>(index / kBlockRows) * groups_ + first / kGroup;
  const size_t at = group * kBlockRows + index % kBlockRows;
  kernels.quantise(row(index) + first, count,
                   {quants_.data() + at * kGroup, scales_.data() + at, scaled_sums_.data() + at,
                    negative_sums_.data() + 2 * at});
}

inline Activations Rows::view() const {
  return {values_.data(), stride_, quants_.data(), scales_.data(), scaled_sums_.data(), negative_sums_.data(), groups_};
}

}  // namespace paceline
