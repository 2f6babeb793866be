// engram.layer_fwd: the whole Engram layer, from keys and values to updated residual streams.
#pragma once

#include <cstdint>
#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// gate_fwd (see gate.h) with weight_fused = weight_hidden * weight_embed gives alpha[t,h]; with a
// convolution (see conv.h) of V = alpha * v, which is never written,
//   u = (v * beta) * g       beta = alpha / sqrt(alpha^2 * mean v^2 + conv_eps)
// and c as there:
//   out = round(x + alpha * v + c * sigmoid(c))                     rounding once
//         round(round(x + alpha * v) + c * sigmoid(c))              rounding twice
//         round(x + alpha * v)                                      without convolution
// The last has the bits of gate_fwd. beta is the same number as the norm of V in exact arithmetic.
//
// Types, masks, strides, cu_seqlens, state and determinism as in gate.h and conv.h; masked tokens
// pass through bit for bit. conv_weight and conv_norm_weight come together or not at all; state
// only with them. dot, alpha, rstd_residual, rstd_key: all four or none; saving changes no bit.
// Aliasing: none, but new_state may be the very same view as state.
// Bytes per token in 16-bit types: (6n+2)*d, as the gate alone. Contract 1.14.
struct LayerForward {
  enum class Rounding { once, twice };

  Tensor residual{};                  // A[T, n, d]
  Tensor kv{};                        // A[T, n+1, d], row n is the value; or, instead:
  Tensor key{};                       // A[T, n, d]
  Tensor value{};                     // A[T, d]
  Tensor weight_hidden{};             // W[n, d]
  Tensor weight_embed{};              // W[n, d]
  Tensor conv_weight{};               // W[n, d, w], optional
  Tensor conv_norm_weight{};          // W[n, d], with conv_weight
  Tensor cu_seqlens{};                // I32[B+1], optional
  Tensor image_token_mask{};          // BOOL[T], optional; true = image
  Tensor state{};                     // F32[B, (w-1)*dilation, n, d], optional
  Tensor out{};                       // out: A[T, n, d]
  Tensor dot{};                       // out: F32[T, n]
  Tensor alpha{};                     // out: F32[T, n]
  Tensor rstd_residual{};             // out: F32[T, n]
  Tensor rstd_key{};                  // out: F32[T, n]
  Tensor new_state{};                 // out: F32[B, (w-1)*dilation, n, d], exactly when state
  std::optional<double> eps{};        // > 0, required
  std::optional<double> clamp{};      // > 0, required
  std::optional<int64_t> dilation{};  // >= 1, required with conv_weight
  std::optional<double> conv_eps{};   // > 0, required with conv_weight
  Rounding rounding = Rounding::once;
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void layer_fwd(Context& context, const LayerForward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const LayerForward& params);

}  // namespace ehc::engram
