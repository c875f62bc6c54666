#pragma once

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace paceline {

void bind_pack(nb::module_& module);

}  // namespace paceline
