#pragma once

#include <nanobind/nanobind.h>

namespace paceline {

namespace nb = nanobind;

void bind_model(nb::module_& module);

}  // namespace paceline
