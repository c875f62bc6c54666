// Fills the table of kernels for one instruction set; included by the files that are compiled with its flags.
#pragma once

#include "attention.hpp"
#include "elementwise.hpp"
#include "gemm.hpp"
#include "kernels.hpp"
#include "vocabulary.hpp"

namespace paceline {
namespace {

template <class V>
constexpr Kernels kernels_of(const char* name) {
  return Kernels{
      .name = name,
      .tile = {tile<V, Format::kF32>, tile<V, Format::kF16>, tile<V, Format::kBF16>, tile<V, Format::kQ4_1>,
               tile<V, Format::kQ4_K>, tile<V, Format::kQ5_1>, tile<V, Format::kQ5_K>, tile<V, Format::kQ6_K>,
               tile<V, Format::kQ8_0>, tile<V, Format::kI8>},
      .rms_norm = rms_norm<V>,
      .add = add<V>,
      .quantise = quantise<V>,
      .rotate = rotate<V>,
      .gate = gate<V>,
      .softcap = softcap<V>,
      .store_kv = {store_kv<V, KVType::kI16>, store_kv<V, KVType::kI8>},
      .attend = {attend<V, KVType::kI16>, attend<V, KVType::kI8>},
      .vocabulary = vocabulary_kernels_of<V>(),
  };
}

}  // namespace
}  // namespace paceline
