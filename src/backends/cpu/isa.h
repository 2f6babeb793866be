// Instruction sets that <op>_cpu.cc files are compiled for, best first, and how an operator lists
// their kernels as implementations.
#pragma once

#include <string_view>

#include "core/operator.h"

// A build may leave some out (EHC_ISAS in cmake/EhcCompiler.cmake).
#if !defined(__x86_64__) || defined(EHC_WITHOUT_avx512bf16)
#define EHC_IF_AVX512BF16(X)
#else
#define EHC_IF_AVX512BF16(X) X(avx512bf16)
#endif
#if !defined(__x86_64__) || defined(EHC_WITHOUT_avx512)
#define EHC_IF_AVX512(X)
#else
#define EHC_IF_AVX512(X) X(avx512)
#endif
#if !defined(__x86_64__) || defined(EHC_WITHOUT_avx2)
#define EHC_IF_AVX2(X)
#else
#define EHC_IF_AVX2(X) X(avx2)
#endif
#if defined(EHC_WITHOUT_generic)
#define EHC_IF_GENERIC(X)
#else
#define EHC_IF_GENERIC(X) X(generic)
#endif
// Kernels on AMX tiles, <op>_amx.cc, which few operators have.
#if !defined(__x86_64__) || defined(EHC_WITHOUT_avx512bf16)
#define EHC_HAS_AMX 0
#else
#define EHC_HAS_AMX 1
#endif
#define EHC_EACH_ISA(X) EHC_IF_AVX512BF16(X) EHC_IF_AVX512(X) EHC_IF_AVX2(X) EHC_IF_GENERIC(X)

namespace ehc {

enum class Isa { amx, avx512bf16, avx512, avx2, generic };
inline constexpr Isa kEachIsa[] = {Isa::amx, Isa::avx512bf16, Isa::avx512, Isa::avx2, Isa::generic};

// Does this processor run code compiled for `isa`? Asking for amx asks the system to keep tiles.
bool cpu_supports(Isa isa);
std::string_view isa_name(Isa isa);

// The reason of an implementation that this processor cannot run; empty when it can.
std::string_view missing_isa(Isa isa);

template <Isa kIsa>
std::string_view refuse_missing_isa(const Call&) {
  return missing_isa(kIsa);
}

}  // namespace ehc
