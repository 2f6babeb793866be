// mhc.merge_fwd, mhc.merge_bwd: the weight of the RMS norm made part of the projection.
#pragma once

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::mhc {

// fn_merged[j,k] = fn[j,k] * norm_weight[k]
//
// M is 1..80, K any. All is fp32. Strides are free but for the last dimension. Aliasing: none.
// Determinism: class E, exact. Bytes: 8*M*K + 4*K. Contract 2.2.
struct MergeForward {
  Tensor fn{};           // F32[M, K]
  Tensor norm_weight{};  // F32[K]
  Tensor fn_merged{};    // out: F32[M, K]
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void merge_fwd(Context& context, const MergeForward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const MergeForward& params);

// grad_fn[j,k] = fma(grad_fn_merged[j,k], norm_weight[k], grad_fn_acc[j,k])
// grad_norm_weight[k] = grad_norm_weight_acc[k] + sum over j of grad_fn_merged[j,k] * fn[j,k]
//
// The sum ascends from +0 by fma; an absent target counts as zeros. Aliasing: a gradient may be the
// very same view as its target; all else apart. Determinism: class E. Bytes: 12*M*K + 8*K, with
// targets 16*M*K + 12*K.
struct MergeBackward {
  Tensor grad_fn_merged{};        // F32[M, K]
  Tensor fn{};                    // F32[M, K]
  Tensor norm_weight{};           // F32[K]
  Tensor grad_fn_acc{};           // F32[M, K], optional
  Tensor grad_norm_weight_acc{};  // F32[K], optional
  Tensor grad_fn{};               // out: F32[M, K]; may be grad_fn_acc
  Tensor grad_norm_weight{};      // out: F32[K]; may be grad_norm_weight_acc
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void merge_bwd(Context& context, const MergeBackward& params);
EHC_API size_t workspace_bytes(const Context& context, const MergeBackward& params);

}  // namespace ehc::mhc
