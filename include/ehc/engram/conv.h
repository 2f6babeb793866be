// engram.conv_fwd: short causal convolution over the gated values of each channel.
#pragma once

#include <cstdint>
#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// Per stream h and channel i, with V = gated_value, g = conv_norm_weight, W = conv_weight:
//   u[t] = (V[t] * 1/sqrt(mean V[t]^2 + conv_eps)) * g            the mean over the row of d
//   c[t] = sum over k = 0 .. w-1 of W[k] * u[t - (w-1-k)*dilation]
//   out[t] = round(V[t] + c[t] * sigmoid(c[t]))
// Tap w-1 is the current token. A tap never leaves its sequence: before the start it reads `state`
// or, without one, nothing. u and c are fp32.
//
// A is BF16, F16 or F32, W BF16 or F32 for each weight. Strides of [T,n,d] and of the weights are
// free but for the last dimension; no bit depends on them.
// cu_seqlens: B+1 borders from 0, not decreasing, to T; absent: one sequence, B = 1. They are
// checked where the host can read them.
// Masked tokens: never read, u = 0, out = 0; they count as positions.
// Decoding: `state` holds the u of the (w-1)*dilation positions before the chunk, oldest first
// (zeros: there were none), `new_state` takes those before the next one. Token by token, or in any
// chunks, gives the bits of one pass over F32. new_state exactly when state; it may be the very
// same view.
// Aliasing: none else. Determinism: a row of out depends on the rows named above alone, for any
// number of threads; same bits from run to run of one implementation.
// Bytes per token in 16-bit types: 4*n*d. Contract 1.13.
struct ConvForward {
  Tensor gated_value{};               // A[T, n, d]
  Tensor conv_weight{};               // W[n, d, w]
  Tensor conv_norm_weight{};          // W[n, d]
  Tensor cu_seqlens{};                // I32[B+1], optional
  Tensor image_token_mask{};          // BOOL[T], optional; true = image
  Tensor state{};                     // F32[B, (w-1)*dilation, n, d], optional
  Tensor out{};                       // out: A[T, n, d]
  Tensor new_state{};                 // out: F32[B, (w-1)*dilation, n, d]
  std::optional<int64_t> dilation{};  // >= 1, required
  std::optional<double> conv_eps{};   // > 0, required
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void conv_fwd(Context& context, const ConvForward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const ConvForward& params);

}  // namespace ehc::engram
