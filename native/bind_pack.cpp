// Python's view of packed matrices.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "bindings.hpp"
#include "pack.hpp"

namespace paceline {
namespace {

PackedMatrix pack_blocks_of(const std::string& type, const Vector<uint8_t>& blocks, int outputs, int inputs,
                            const std::optional<Vector<int32_t>>& row_order) {
  std::span<const int32_t> order;
  if (row_order) order = {row_order->data(), row_order->size()};
  nb::gil_scoped_release released;
  return pack_ggml(type, {blocks.data(), blocks.size()}, outputs, inputs, order);
}

PackedMatrix pack_array(const Table<float>& values, const std::string& format) {
  nb::gil_scoped_release released;
  return pack_floats(values.data(), static_cast<int>(values.shape(0)), static_cast<int>(values.shape(1)),
                     format_named(format));
}

nb::object unpacked(const PackedMatrix& packed) {
  const Matrix matrix = packed.view();
  const auto [array, values] = new_array<float>({static_cast<size_t>(matrix.outputs), static_cast<size_t>(matrix.inputs)});
  {
    nb::gil_scoped_release released;
    unpack(matrix, values);
  }
  return array;  // counts a reference: not without Python's lock
}

}  // namespace

void bind_pack(nb::module_& module) {
  nb::class_<PackedMatrix>(module, "PackedMatrix", "A weight matrix as the kernels read it.")
      .def_prop_ro("format", [](const PackedMatrix& packed) { return std::string(traits(packed.view().format).name); })
      .def_prop_ro("outputs", [](const PackedMatrix& packed) { return packed.view().outputs; })
      .def_prop_ro("inputs", [](const PackedMatrix& packed) { return packed.view().inputs; })
      .def("unpack", &unpacked, "float32 [outputs, inputs].");
  module.def("pack_ggml", &pack_blocks_of, nb::arg("type_name"), nb::arg("blocks"), nb::arg("outputs"),
             nb::arg("inputs"), nb::arg("row_order").none() = nb::none(),
             "Rows of GGUF's blocks (uint8), output i from row row_order[i]; exact. ValueError where values are not "
             "finite or sizes do not fit.");
  module.def("pack_floats", &pack_array, nb::arg("values"), nb::arg("format"),
             "float32 [outputs, inputs] rounded to f32, f16, bf16, i8 or q4_1. ValueError as pack_ggml.");
  module.def("packed_format", [](const std::string& type) { return std::string(traits(packed_format(type)).name); },
             nb::arg("type_name"), "Name of the format that holds a GGUF type.");
}

}  // namespace paceline
