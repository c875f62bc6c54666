#pragma once

#include <nanobind/nanobind.h>

namespace paceline {

namespace nb = nanobind;

void bind_bandwidth(nb::module_& module);

}  // namespace paceline
