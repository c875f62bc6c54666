#include "bandwidth.hpp"
#include "bindings.hpp"

namespace paceline {

void bind_bandwidth(nb::module_& module) {
  module.def("read_bandwidth", &read_bandwidth, nb::arg("num_threads"), nb::arg("num_bytes"),
             nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace paceline
