// mhc.post_fwd, mhc.post_bwd: a layer's output put back into the streams.
#pragma once

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::mhc {

// new_residual[t,o,:] = round(post[t,o] * layer_output[t,:] + sum_i comb[t,i,o] * residual[t,i,:]),
// fp32: the rounded product first, then the terms in ascending i, each by fma. comb is [input
// stream, output stream], the transpose of H_res.
//
// A is BF16, F16 or F32, one type per call; n is 1..8. T may be several leading dimensions. Strides
// are free but for the last dimension. Aliasing: new_residual may be the very same view as residual
// (in place); all else must be apart. Determinism: class E, every element the same bits on every
// implementation but the double reference. Bytes per token in 16-bit types: (4n+2)*d + 4(n*n+n).
// Contract 2.10.
struct PostForward {
  Tensor layer_output{};  // A[T, d]
  Tensor residual{};      // A[T, n, d]
  Tensor post{};          // F32[T, n]
  Tensor comb{};          // F32[T, n, n], [input stream, output stream]
  Tensor new_residual{};  // out: A[T, n, d]; may be residual itself
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void post_fwd(Context& context, const PostForward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const PostForward& params);

// With g_o = grad_new_residual[t,o], y = layer_output[t], b_i = residual[t,i]:
//   grad_layer_output[t,:] = round(sum_o post[t,o] * g_o)
//   grad_residual[t,i,:] = round(sum_o comb[t,i,o] * g_o)
//   grad_post[t,o] = sum over d of y * g_o
//   grad_comb[t,i,o] = sum over d of b_i * g_o
// Sums over streams are those of the forward: ascending o from +0, by fma. All are written, none is
// added to. Aliasing: none. Determinism: the two activations are class E; grad_post and grad_comb
// are class R per implementation: their sum is a tree that depends on d alone. A token depends on
// itself alone. Bytes per token in 16-bit types: (6n+4)*d + 8(n*n+n). Contract 2.10.
struct PostBackward {
  Tensor grad_new_residual{};  // A[T, n, d]
  Tensor layer_output{};       // A[T, d]
  Tensor residual{};           // A[T, n, d]
  Tensor post{};               // F32[T, n]
  Tensor comb{};               // F32[T, n, n]
  Tensor grad_layer_output{};  // out: A[T, d]
  Tensor grad_residual{};      // out: A[T, n, d]
  Tensor grad_post{};          // out: F32[T, n]
  Tensor grad_comb{};          // out: F32[T, n, n]
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void post_bwd(Context& context, const PostBackward& params);
EHC_API size_t workspace_bytes(const Context& context, const PostBackward& params);

}  // namespace ehc::mhc
