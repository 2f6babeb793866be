// Arguments of the merge kernels.
#pragma once

#include "backends/cpu/kernel.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

struct MergeForwardArgs {
  int64_t mixes = 0;  // M
  MixRows fn;
  const float* norm_weight = nullptr;  // F32[K]
  MixRows merged;
};

struct MergeBackwardArgs {
  int64_t mixes = 0;
  MixRows grad_merged, fn;
  const float* norm_weight = nullptr;
  MixRows grad_fn_acc;                     // null data: zeros
  const float* grad_weight_acc = nullptr;  // F32[K], or null: zeros
  MixRows grad_fn;                         // may be grad_fn_acc
  float* grad_weight = nullptr;            // F32[K]; may be grad_weight_acc
};

// Columns [begin, end).
EHC_CPU_KERNEL(void merge_fwd_columns(const MergeForwardArgs& args, int64_t begin, int64_t end));
EHC_CPU_KERNEL(void merge_bwd_columns(const MergeBackwardArgs& args, int64_t begin, int64_t end));

// The same in plain loops, in double and in float.
template <class Real>
void merge_fwd_reference(const MergeForwardArgs& args, int64_t begin, int64_t end);
template <class Real>
void merge_bwd_reference(const MergeBackwardArgs& args, int64_t begin, int64_t end);

}  // namespace ehc::mhc
