#include "kernels_of.hpp"
#include "vec_avx512.hpp"

namespace paceline {

extern const Kernels kAvx512Kernels;
const Kernels kAvx512Kernels = kernels_of<Avx512>("avx512");

}  // namespace paceline
