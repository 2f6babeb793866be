// Arguments of the kernel that normalises the input of a layer.
#pragma once

#include "backends/cpu/kernel.h"
#include "ops/mhc/pre_apply/pre_apply_args.h"
#include "ops/mhc/reduce_partials/reduce_partials_args.h"
#include "ops/mhc/shared/stream_rows.h"
#include "ops/mhc/sinkhorn/sinkhorn_args.h"
#include "ops/mhc/split/split_args.h"

namespace ehc::mhc {

struct LayerNormArgs {
  StreamSizes sizes;
  StreamRows rows;                  // A[T,d]
  StreamRows out;                   // A[T,d]; may be rows
  DType weight_type = DType::none;  // bf16 or f32
  const void* weight = nullptr;     // W[d]
  float eps = 0;
  bool streaming = false;  // store past the caches where rows allow it; no bit depends on it
};

// All of it, for a kernel that does it in one go. `split.pre` and `split.comb_logits` are not used.
struct BigFuseArgs {
  ReducePartialsForwardArgs reduce;
  SplitForwardArgs split;
  SinkhornRule sinkhorn;
  Coefficients comb;             // F32[T,n,n]
  PreApplyForwardArgs collapse;  // without coefficients
  LayerNormArgs norm;            // null weight: none
};

// Tokens [begin, end).
EHC_CPU_KERNEL(void layer_norm_rows(const LayerNormArgs& args, int64_t begin, int64_t end));

// The same in plain loops, in double and in float.
template <class Real>
void layer_norm_reference(const LayerNormArgs& args, int64_t begin, int64_t end);

}  // namespace ehc::mhc
