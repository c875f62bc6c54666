// Python bindings of the native engine; src/paceline/_native.pyi describes them.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_bandwidth(nb::module_& module);

NB_MODULE(_native, module) {
  module.def("version", [] { return PACELINE_VERSION; });
  bind_bandwidth(module);
}
