// engram.layer_bwd: gradients of the whole Engram layer.
#pragma once

#include <cstdint>
#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// Backward of layer_fwd without state: conv_bwd of V = alpha * v with G = grad_out gives gV, which
// is kept in fp32 and never written; then gate_bwd with grad_out for the residual path and gV for
// the value path; then the product rule of weight_fused. See conv_bwd.h, gate_bwd.h,
// grad_w_reduce.h. Statistics of the gate are computed anew. Of V only the row v is read:
//   r = 1/sqrt(alpha^2 * mean v^2 + conv_eps)      beta = alpha * r
//   n = v * beta, the row of V without its norm weight      u = n * g
// Without convolution gV = grad_out: the gradients of the streams and of kv have the bits of
// gate_bwd. `rounding` of the forward is of no effect here.
//
// Types, masks, strides, cu_seqlens as in layer_fwd. Masked tokens: grad_residual = grad_out bit
// for bit, gradients of kv 0, no part in any sum; residual and kv are not read. conv_weight,
// conv_norm_weight come together or not at all, and so do their gradients. kv, key, value, their
// gradients: packed in and out or apart in and out. grad_*_acc: if present, the gradient is added
// to it; the output may be the very same view. Aliasing: none else. Determinism: gradients of a
// token depend on the tokens that the convolution names, not on T, for any number of threads; sums
// over tokens are cut by T alone, each part in token order; same bits from run to run of one
// implementation. Bytes per token in 16-bit types: (10n+4)*d. Contract 1.14.
struct LayerBackward {
  Tensor grad_out{};                   // A[T, n, d]
  Tensor residual{};                   // A[T, n, d]
  Tensor kv{};                         // A[T, n+1, d], row n is the value; or, instead:
  Tensor key{};                        // A[T, n, d]
  Tensor value{};                      // A[T, d]
  Tensor weight_hidden{};              // W[n, d]
  Tensor weight_embed{};               // W[n, d]
  Tensor conv_weight{};                // W[n, d, w], optional
  Tensor conv_norm_weight{};           // W[n, d], with conv_weight
  Tensor cu_seqlens{};                 // I32[B+1], optional
  Tensor image_token_mask{};           // BOOL[T], optional; true = image
  Tensor grad_weight_hidden_acc{};     // F32[n, d], optional
  Tensor grad_weight_embed_acc{};      // F32[n, d], optional
  Tensor grad_conv_weight_acc{};       // F32[n, d, w], optional, only with conv_weight
  Tensor grad_conv_norm_weight_acc{};  // F32[n, d], optional, only with conv_weight
  Tensor grad_residual{};              // out: A[T, n, d]
  Tensor grad_kv{};                    // out: A[T, n+1, d] with kv; else:
  Tensor grad_key{};                   // out: A[T, n, d]
  Tensor grad_value{};                 // out: A[T, d]
  Tensor grad_weight_hidden{};         // out: F32[n, d]
  Tensor grad_weight_embed{};          // out: F32[n, d]
  Tensor grad_conv_weight{};           // out: F32[n, d, w], with conv_weight
  Tensor grad_conv_norm_weight{};      // out: F32[n, d], with conv_weight
  std::optional<double> eps{};         // > 0, required
  std::optional<double> clamp{};       // > 0, required
  std::optional<int64_t> dilation{};   // >= 1, required with conv_weight
  std::optional<double> conv_eps{};    // > 0, required with conv_weight
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void layer_bwd(Context& context, const LayerBackward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const LayerBackward& params);

}  // namespace ehc::engram
