// engram.grad_w_reduce: gradients of the gate's two norm weights from gate_bwd's partial sums.
#pragma once

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// s[h,i] = sum over p, ascending, of grad_weight_partial[p,h,i], in F32; then the product rule of
// weight_fused = weight_hidden * weight_embed:
//   grad_weight_hidden = fma(s, weight_embed, grad_weight_hidden_acc)
//   grad_weight_embed  = fma(s, weight_hidden, grad_weight_embed_acc)
// An absent target counts as zeros. P = 0 gives s = 0: zeros, or the targets as they are.
// Strides are free but for the last dimension. Aliasing: a gradient may be the very same view as
// its target (accumulate in place); all else apart. Determinism: same bits for any number of
// threads, strides and alignment, and the same in every implementation but the double reference.
// Bytes: 4*P*n*d + 12*n*d + the weights' sizes (8*n*d more with both targets). Contract 1.11.
struct GradWReduce {
  Tensor grad_weight_partial{};     // F32[P, n, d]
  Tensor weight_hidden{};           // BF16 or F32[n, d]
  Tensor weight_embed{};            // BF16 or F32[n, d]
  Tensor grad_weight_hidden_acc{};  // F32[n, d], optional
  Tensor grad_weight_embed_acc{};   // F32[n, d], optional
  Tensor grad_weight_hidden{};      // out: F32[n, d]
  Tensor grad_weight_embed{};       // out: F32[n, d]
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void grad_w_reduce(Context& context, const GradWReduce& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const GradWReduce& params);

}  // namespace ehc::engram
