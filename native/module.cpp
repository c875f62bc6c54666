// Python bindings of the native engine; src/paceline/_native.pyi describes them.
#include "bind_model.hpp"
#include "bind_bandwidth.hpp"
#include "bind_pack.hpp"
#include "bind_sampling.hpp"

NB_MODULE(_native, module) {
  module.def("version", [] { return PACELINE_VERSION; });
  paceline::bind_model(module);
  paceline::bind_bandwidth(module);
  paceline::bind_pack(module);
  paceline::bind_sampling(module);
}
