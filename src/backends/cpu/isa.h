// Instruction sets that <op>_cpu.cc files are compiled for, best first, and how an operator lists
// their kernels as implementations.
#pragma once

#include <string>

#include "core/operator.h"

#if defined(__x86_64__)
#define EHC_EACH_ISA(X) X(avx512bf16) X(avx512) X(avx2) X(generic)
#else
#define EHC_EACH_ISA(X) X(generic)
#endif

namespace ehc {

enum class Isa { avx512bf16, avx512, avx2, generic };

// Does this processor run code compiled for `isa`?
bool cpu_supports(Isa isa);
std::string_view isa_name(Isa isa);

template <Isa kIsa>
std::string refuse_missing_isa(const Call&) {
  return cpu_supports(kIsa) ? std::string()
                            : "this processor has no " + std::string(isa_name(kIsa));
}

}  // namespace ehc
