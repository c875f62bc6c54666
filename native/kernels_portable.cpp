#include "kernels_of.hpp"
#include "vec_portable.hpp"

namespace paceline {

extern const Kernels kPortableKernels;
const Kernels kPortableKernels = kernels_of<Portable>("portable");

}  // namespace paceline
