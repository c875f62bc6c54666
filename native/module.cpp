// Python bindings of the native engine; src/paceline/_native.pyi describes them.
#include "bindings.hpp"

NB_MODULE(_native, module) {
  module.def("version", [] { return PACELINE_VERSION; });
  paceline::bind_model(module);
  paceline::bind_bandwidth(module);
  paceline::bind_drafting(module);
  paceline::bind_pack(module);
  paceline::bind_sampling(module);
}
