#include "kernels_of.hpp"
#include "vec_avx2.hpp"

namespace paceline {

extern const Kernels kAvx2vnniKernels;
const Kernels kAvx2vnniKernels = kernels_of<Avx2<true>>("avx2vnni");

}  // namespace paceline
