// Arguments of the loops of defect.
#pragma once

#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

struct DefectArgs {
  int64_t streams = 0;              // n
  Coefficients comb;                // F32[T,n,n]
  float* row_defect = nullptr;      // F32[T]
  float* column_defect = nullptr;   // F32[T]
  float* spectral_bound = nullptr;  // F32[T]
};

}  // namespace ehc::mhc
