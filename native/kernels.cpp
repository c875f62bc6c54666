#include "kernels.hpp"

#include <stdexcept>
#include <string>

#ifdef PACELINE_X86
#include <cpuid.h>
#endif

namespace paceline {

#ifdef PACELINE_X86
extern const Kernels kAvx512Kernels, kAvx2vnniKernels, kAvx2Kernels;
#endif
extern const Kernels kPortableKernels;

namespace {

#ifdef PACELINE_X86
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & (1u << 29)) != 0;
}

bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & (1u << 4)) != 0;
}
#endif

struct Choice {
  const Kernels* kernels;
  bool available;
};

}  // namespace

const Kernels& select_kernels(const char* name) {
#ifdef PACELINE_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
#endif
  const Choice choices[] = {
#ifdef PACELINE_X86
      {&kAvx512Kernels, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vnni")},
      {&kAvx2vnniKernels, avx2 && has_avx_vnni()},
      {&kAvx2Kernels, avx2},
#endif
      {&kPortableKernels, true},
  };
  const std::string wanted = name;
  std::string known;
  for (const Choice& choice : choices) {
    if (choice.available && (wanted.empty() || wanted == choice.kernels->name)) return *choice.kernels;
    if (choice.available) known += (known.empty() ? "" : ", ") + std::string(choice.kernels->name);
  }
  throw std::invalid_argument("this machine has no kernels named '" + wanted + "'; it has " + known);
}

}  // namespace paceline
