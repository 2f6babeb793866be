// Arguments of the kernels that the entry of a sublayer has of its own; the others are those of the
// operators that it stands for.
#pragma once

#include "backends/cpu/kernel.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

// y = (c r) w with r = 1 / sqrt(mean c^2 + eps), backwards.
struct LayerNormBackwardArgs {
  StreamSizes sizes;
  StreamRows rows;                  // c A[T,d]
  StreamRows grad;                  // of y, A[T,d]
  DType weight_type = DType::none;  // bf16 or f32
  const void* weight = nullptr;     // W[d]
  float eps = 0;
  GradientRows grad_rows;  // [T,d]; A may be `rows`
};

// grad_pre[t,i] = sum over d of grad_row[t,:] * residual[t,i,:]
struct GradPreArgs {
  StreamSizes sizes;
  GradientRows grad_row;  // [T,d]
  StreamRows residual;    // A[T,n,d]
  Coefficients grad_pre;  // F32[T,n]
};

// Tokens [begin, end); grad_weight F32[d] becomes their sum.
EHC_CPU_KERNEL(void layer_norm_bwd_tokens(const LayerNormBackwardArgs& args, int64_t begin,
                                          int64_t end, float* grad_weight));
EHC_CPU_KERNEL(void grad_pre_tokens(const GradPreArgs& args, int64_t begin, int64_t end));

// The same in plain loops, in double and in float.
template <class Real>
void layer_norm_bwd_reference(const LayerNormBackwardArgs& args, int64_t begin, int64_t end,
                              float* grad_weight);
template <class Real>
void grad_pre_reference(const GradPreArgs& args, int64_t begin, int64_t end);

}  // namespace ehc::mhc
