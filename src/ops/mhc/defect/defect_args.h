// Arguments of the defect kernel.
#pragma once

#include "backends/cpu/kernel.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

struct DefectArgs {
  int64_t streams = 0;              // n
  Coefficients comb;                // F32[T,n,n]
  float* row_defect = nullptr;      // F32[T]
  float* column_defect = nullptr;   // F32[T]
  float* spectral_bound = nullptr;  // F32[T]
};

// Tokens [begin, end).
EHC_CPU_KERNEL(void defect_tokens(const DefectArgs& args, int64_t begin, int64_t end));

}  // namespace ehc::mhc
