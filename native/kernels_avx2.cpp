#include "kernels_of.hpp"
#include "vec_avx2.hpp"

namespace paceline {

extern const Kernels kAvx2Kernels;
const Kernels kAvx2Kernels = kernels_of<Avx2<false>>("avx2");

}  // namespace paceline
