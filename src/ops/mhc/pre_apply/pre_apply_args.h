// Arguments of the pre_apply kernels.
#pragma once

#include "backends/cpu/kernel.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

struct PreApplyForwardArgs {
  StreamSizes sizes;
  StreamRows residual;     // A[T,n,d]
  Coefficients pre;        // F32[T,n]
  StreamRows layer_input;  // A[T,d]
  // Store past the caches where rows allow it; no bit depends on it.
  bool streaming = false;
};

struct PreApplyBackwardArgs {
  StreamSizes sizes;
  StreamRows grad_layer_input;   // A[T,d]
  StreamRows residual;           // A[T,n,d]
  Coefficients pre;              // F32[T,n]
  StreamRows grad_residual_acc;  // A[T,n,d]; null data: zeros
  StreamRows grad_residual;      // A[T,n,d]; may be grad_residual_acc
  Coefficients grad_pre;         // F32[T,n]
  bool streaming = false;        // as above: grad_residual
};

EHC_CPU_KERNEL(void pre_apply_fwd_tile(const PreApplyForwardArgs& args, const Tile& tile));
// Tokens [begin, end).
EHC_CPU_KERNEL(void pre_apply_bwd_tokens(const PreApplyBackwardArgs& args, int64_t begin,
                                         int64_t end));

// The same in plain loops, in double and in float.
template <class Real>
void pre_apply_fwd_reference(const PreApplyForwardArgs& args, const Tile& tile);
template <class Real>
void pre_apply_bwd_reference(const PreApplyBackwardArgs& args, int64_t begin, int64_t end);

}  // namespace ehc::mhc
