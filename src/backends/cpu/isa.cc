#include "backends/cpu/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ehc {

#if defined(__x86_64__)
namespace {
// Clang 14 does not know the name "f16c".
bool has_f16c() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
}  // namespace
#endif

bool cpu_supports(Isa isa) {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2") != 0 &&
                           __builtin_cpu_supports("fma") != 0 &&
                           __builtin_cpu_supports("bmi2") != 0 && has_f16c();
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

std::string_view missing_isa(Isa isa) {
  constexpr std::string_view kReasons[] = {
      "this processor has no avx512bf16", "this processor has no avx512",
      "this processor has no avx2", "this processor has no generic"};
  return cpu_supports(isa) ? std::string_view() : kReasons[static_cast<int>(isa)];
}

std::string_view isa_name(Isa isa) {
  constexpr std::string_view kNames[] = {"avx512bf16", "avx512", "avx2", "generic"};
  return kNames[static_cast<int>(isa)];
}

}  // namespace ehc
