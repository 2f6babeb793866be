// engram.conv_bwd: gradients of the short causal convolution.
#pragma once

#include <cstdint>
#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// Backward of conv_fwd without state. Per stream h and channel i, with V = gated_value,
// G = grad_out, g = conv_norm_weight, W = conv_weight and u, c of the forward (see conv.h):
//   r[t]  = 1/sqrt(mean V[t]^2 + conv_eps)        s = sigmoid(c[t])
//   gc[t] = G[t] * s (1 + c[t] (1 - s))
//   gu[t] = sum over j = 0 .. w-1 of W[w-1-j] * gc[t + j*dilation]
//   grad_gated_value[t]     = round(G[t] + r (g gu - V r^2 * mean(g gu V)))      means over the row
//   grad_conv_weight[w-1-j] = sum over t of gc[t] * u[t - j*dilation]
//   grad_conv_norm_weight   = sum over t of gu[t] * V[t] * r[t]
// Terms outside the sequence are left out. Everything before the rounding is fp32.
//
// A is BF16, F16 or F32, W BF16 or F32 for each weight. Strides of [T,n,d] and of the weights are
// free but for the last dimension; no bit depends on them. cu_seqlens as in conv_fwd.
// Masked tokens: gated_value and grad_out are never read, u = 0 and gc = 0, grad_gated_value = 0.
// grad_conv_weight_acc, grad_conv_norm_weight_acc: if present, the gradient is added to them; the
// output may be the very same view.
// Aliasing: none else. Determinism: a row of grad_gated_value depends on the rows named above
// alone, for any number of threads, and not on T; sums over tokens are cut by T alone, each part in
// token order; same bits from run to run of one implementation. Bytes per token in 16-bit types:
// 6*n*d. Contract 1.13.
struct ConvBackward {
  Tensor grad_out{};                   // A[T, n, d]
  Tensor gated_value{};                // A[T, n, d]
  Tensor conv_weight{};                // W[n, d, w]
  Tensor conv_norm_weight{};           // W[n, d]
  Tensor cu_seqlens{};                 // I32[B+1], optional
  Tensor image_token_mask{};           // BOOL[T], optional; true = image
  Tensor grad_conv_weight_acc{};       // F32[n, d, w], optional
  Tensor grad_conv_norm_weight_acc{};  // F32[n, d], optional
  Tensor grad_gated_value{};           // out: A[T, n, d]
  Tensor grad_conv_weight{};           // out: F32[n, d, w]
  Tensor grad_conv_norm_weight{};      // out: F32[n, d]
  std::optional<int64_t> dilation{};   // >= 1, required
  std::optional<double> conv_eps{};    // > 0, required
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void conv_bwd(Context& context, const ConvBackward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const ConvBackward& params);

}  // namespace ehc::engram
