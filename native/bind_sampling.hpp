// Python's view of row sampling: types.RowSampling in, arrays out.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <utility>
#include <vector>

#include "sampling.hpp"

namespace nb = nanobind;

namespace paceline {

// Arrays as arguments.
template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Table = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// A NumPy array of its own, and where its elements lie.
template <class T>
std::pair<nb::object, T*> new_array(std::initializer_list<size_t> shape) {
  size_t size = 1;
  for (const size_t extent : shape) size *= extent;
  T* data = new T[size]();
  nb::capsule owner(data, [](void* pointer) noexcept { delete[] static_cast<T*>(pointer); });
  return {nb::cast(nb::ndarray<nb::numpy, T>(data, shape, owner)), data};
}

// The rows of one pass: parameters read from a types.RowSampling, and room for the results. Made and read with Python's
// lock held, filled without it.
class SampledRows {
 public:
  // Throws std::invalid_argument where arrays do not fit the number of rows or the vocabulary.
  SampledRows(nb::handle sampling, size_t num_rows, int vocab_size);

  const RowParams* params() const { return params_.data(); }
  RowResult* results() { return results_.data(); }

  // A dict of arrays: token_ids [M] int32 (-1 where there is none), all_banned and has_nan [M] bool; token, rank,
  // top_ids and top of types.Logprobs where asked for; successors [M, k] int32 where asked for.
  nb::object arrays() const;

 private:
  std::vector<nb::object> kept_;  // arrays that params_ points into
  std::vector<RowParams> params_;
  std::vector<RowResult> results_;
  nb::object top_ids_, top_, successors_;  // null = not asked for
};

void bind_sampling(nb::module_& module);

}  // namespace paceline
