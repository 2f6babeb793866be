// mhc.pre_apply_fwd, mhc.pre_apply_bwd: the streams collapsed to the input of a layer.
#pragma once

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::mhc {

// layer_input[t,:] = round(sum_i pre[t,i] * residual[t,i,:]), fp32, ascending i from +0, each term
// by fma.
//
// A is BF16, F16 or F32, one type per call; n is 1..8. T may be several leading dimensions. Strides
// are free but for the last dimension. Aliasing: none. Determinism: class E, every element the same
// bits on every implementation but the double reference. Bytes per token in 16-bit types: (2n+2)*d
// + 4n. Contract 2.8.
struct PreApplyForward {
  Tensor residual{};     // A[T, n, d]
  Tensor pre{};          // F32[T, n]
  Tensor layer_input{};  // out: A[T, d]
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void pre_apply_fwd(Context& context, const PreApplyForward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const PreApplyForward& params);

// With g = grad_layer_input[t]:
//   grad_pre[t,i] = sum over d of g * residual[t,i,:]
//   grad_residual[t,i,:] = round(grad_residual_acc[t,i,:] + pre[t,i] * g), one fma; +0 without acc
// Aliasing: grad_residual may be the very same view as grad_residual_acc; all else must be apart.
// Determinism: grad_residual is class E; grad_pre is class R per implementation: its sum is a tree
// that depends on d alone. A token depends on itself alone. Bytes per token in 16-bit types:
// (4n+2)*d
// + 8n, with grad_residual_acc (6n+2)*d + 8n. Contract 2.8.
struct PreApplyBackward {
  Tensor grad_layer_input{};   // A[T, d]
  Tensor residual{};           // A[T, n, d]
  Tensor pre{};                // F32[T, n]
  Tensor grad_residual_acc{};  // A[T, n, d], optional: added to
  Tensor grad_residual{};      // out: A[T, n, d]; may be grad_residual_acc itself
  Tensor grad_pre{};           // out: F32[T, n]
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void pre_apply_bwd(Context& context, const PreApplyBackward& params);
EHC_API size_t workspace_bytes(const Context& context, const PreApplyBackward& params);

}  // namespace ehc::mhc
