// mhc.multilayer_recompute: the residuals and layer inputs of a block of layers, from its first
// residual and what was kept of each layer.
#pragma once

#include <span>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::mhc {

// With x = residual, for l = 0, 1, ... :
//   layer_input[l] = pre_apply_fwd(x, pre[l])
//   new_residual[l] = x = post_fwd(layer_output[l], x, post[l], comb[l])    as long as there are
//   any
// bit for bit: the rounded new residual feeds the next layer.
//
// pre has at least one tensor, layer_input as many; layer_output, post, comb and new_residual have
// as many as pre or all one fewer (none at all for a single layer). Any number of layers. The spans
// and their tensors must live until the call returns.
// A is BF16, F16 or F32, one type per call; n is 1..8. T may be several leading dimensions. Strides
// are free but for the last dimension, for each tensor. Aliasing: none. Determinism: class E, every
// element the same bits on every implementation but the double reference. Bytes per token in 16-bit
// types, with Ll layer inputs and Lp new residuals: 2n*d + Ll*(4n+2d) + Lp*(2d+4n+4n*n+2n*d).
// Contract 2.12.
struct MultilayerRecompute {
  Tensor residual{};                       // A[T, n, d]
  std::span<const Tensor> pre{};           // each F32[T, n]
  std::span<const Tensor> layer_output{};  // each A[T, d]
  std::span<const Tensor> post{};          // each F32[T, n]
  std::span<const Tensor> comb{};          // each F32[T, n, n], [input stream, output stream]
  std::span<const Tensor> layer_input{};   // out: each A[T, d]
  std::span<const Tensor> new_residual{};  // out: each A[T, n, d]
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void multilayer_recompute(Context& context, const MultilayerRecompute& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const MultilayerRecompute& params);

}  // namespace ehc::mhc
