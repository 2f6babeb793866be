// engram.kv_projection_bwd: gradients of engram.kv_projection_fwd.
#pragma once

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// grad_embedding[t, e] = round(sum over (j, i) of grad_kv[t, j, i] * weight[j, i, e])
// grad_weight[j, i, e] = sum over t of grad_kv[t, j, i] * embedding[t, e]  (+ grad_weight_acc)
// grad_bias[j, i]      = sum over t of grad_kv[t, j, i]                    (+ grad_bias_acc)
// Operands are widened to fp32 and sums are fp32. With T = 0 gradients of parameters are zero, or
// the target's.
//
// A is BF16, F16 or F32, one type per call. T may be several leading dimensions that flatten;
// strides are free but for the last dimension. An output may be its own target; else outputs must
// be apart from everything. Determinism: same bits from run to run and for any number of threads;
// a token's grad_embedding does not depend on what other tokens hold, but its bits may depend on T
// (cpu.openblas) or not (the others). Sums over t are chains of 128 tokens, added in ascending
// order. Workspace: ask workspace_bytes with the same context. Cost: 4*T*E*(n+1)*d FLOP; bytes at
// least those of the tensors. Contract 1.7.
struct KvProjectionBackward {
  Tensor grad_kv{};          // A[T, n+1, d]
  Tensor embedding{};        // A[T, E]
  Tensor weight{};           // A[n+1, d, E]
  Tensor grad_weight_acc{};  // F32[n+1, d, E], optional
  Tensor grad_bias_acc{};    // F32[n+1, d], optional
  Tensor grad_embedding{};   // out: A[T, E]
  Tensor grad_weight{};      // out: F32[n+1, d, E]
  Tensor grad_bias{};        // out: F32[n+1, d]
};

// Throws Error{contract} for arguments that break the above and a workspace that is too small.
EHC_API void kv_projection_bwd(Context& context, const KvProjectionBackward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const KvProjectionBackward& params);

}  // namespace ehc::engram
