// What the bindings share: arrays at the border to Python, and one function for each file of them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <utility>

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

void bind_bandwidth(nb::module_& module);
void bind_drafting(nb::module_& module);
void bind_model(nb::module_& module);
void bind_pack(nb::module_& module);
void bind_sampling(nb::module_& module);

}  // namespace paceline
