#include "backends/cpu/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
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

// Why tiles cannot be used, or empty. They need the instructions, a system that saves them with the
// other registers, and on Linux its leave for this process.
std::string_view find_amx_fault() {
  constexpr unsigned kTilesAndBf16 = 1U << 24 | 1U << 22;
  constexpr unsigned kSavesRegisters = 1U << 27;
  constexpr unsigned kTileState = 3U << 17;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTilesAndBf16) != kTilesAndBf16) {
    return "this processor has no amx";
  }
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kSavesRegisters) == 0) {
    return "this system does not save the registers of amx";
  }
  __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  if ((a & kTileState) != kTileState) return "this system does not save the registers of amx";
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
    return "this system does not permit amx";
  }
  return {};
#else
  return "amx is supported on Linux only";
#endif
}

std::string_view amx_fault() {
  static const std::string_view fault = find_amx_fault();
  return fault;
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
    case Isa::amx:
      return bf16 && amx_fault().empty();
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
#if defined(__x86_64__)
  if (isa == Isa::amx && !amx_fault().empty()) return amx_fault();
#endif
  constexpr std::string_view kReasons[] = {
      "this processor has no amx", "this processor has no avx512bf16",
      "this processor has no avx512", "this processor has no avx2",
      "this processor has no generic"};
  return cpu_supports(isa) ? std::string_view() : kReasons[static_cast<int>(isa)];
}

std::string_view isa_name(Isa isa) {
  constexpr std::string_view kNames[] = {"amx", "avx512bf16", "avx512", "avx2", "generic"};
  return kNames[static_cast<int>(isa)];
}

}  // namespace ehc
