#include <nanobind/nanobind.h>

#include "bandwidth.hpp"

namespace nb = nanobind;

void bind_bandwidth(nb::module_& module) {
  module.def("read_bandwidth", &paceline::read_bandwidth, nb::arg("num_threads"), nb::arg("num_bytes"),
             nb::call_guard<nb::gil_scoped_release>());
}
