#include "backends/cpu/isa.h"

namespace ehc {

bool cpu_supports(Isa isa) {
#if defined(__x86_64__)
  static const bool avx2 =
      __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
      __builtin_cpu_supports("bmi2") != 0 && __builtin_cpu_supports("f16c") != 0;
  static const bool avx512 =
      avx2 && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
      __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512cd") != 0 &&
      __builtin_cpu_supports("avx512vl") != 0;
  static const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") != 0;
  switch (isa) {
    case Isa::avx512bf16:
      return bf16;
    case Isa::avx512:
      return avx512;
    case Isa::avx2:
      return avx2;
    case Isa::generic:
      return true;
  }
#endif
  return isa == Isa::generic;
}

std::string_view isa_name(Isa isa) {
  constexpr std::string_view kNames[] = {"avx512bf16", "avx512", "avx2", "generic"};
  return kNames[static_cast<int>(isa)];
}

}  // namespace ehc
