// What a seam has of its own; its other kernels are those of the operators that it stands for.
#pragma once

#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

struct FnSumArgs {
  int64_t streams = 0, hidden = 0;
  MixRows fn;   // F32[N,n*d]
  MixRows sum;  // F32[N,d]
};

// sum[j,c] = fn[j,0,c] + fn[j,1,c] + ... + fn[j,n-1,c] for rows [begin, end). Class E: one order
// for all implementations.
void fn_sum_rows(const FnSumArgs& args, int64_t begin, int64_t end);

}  // namespace ehc::mhc
