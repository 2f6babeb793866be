// mhc.head_mix_fwd, mhc.head_mix_bwd: the mixes that collapse the streams for the head of the
// model.
#pragma once

#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::mhc {

// pre = sigmoid(mixes * scale + base) + pre_eps, the sum in the sigmoid by fma; the bits of
// split_fwd's pre.
//
// n is 1..8. T may be several leading dimensions. All is fp32. Strides are free but for the last
// dimension. Aliasing: none. Determinism: a token depends on itself alone; same bits for any
// threads, strides, alignment. Bytes per token: 8*n. Contract 2.11.
struct HeadMixForward {
  Tensor mixes{};                   // F32[T, n]
  Tensor scale{};                   // F32[1]
  Tensor base{};                    // F32[n]
  Tensor pre{};                     // out: F32[T, n]
  std::optional<double> pre_eps{};  // >= 0, required
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void head_mix_fwd(Context& context, const HeadMixForward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const HeadMixForward& params);

// With u = mixes * scale + base and delta = grad_pre * sigmoid'(u):
//   grad_mixes = delta * scale
//   grad_scale = grad_scale_acc + sum of delta * mixes over tokens and streams
//   grad_base[j] = grad_base_acc[j] + sum of delta[:,j] over tokens
// Sums over tokens are those of chunks that T alone decides, added in ascending order; an absent
// target counts as zeros, T = 0 gives zeros or the targets. Aliasing: grad_scale and grad_base may
// be the very same views as their targets; all else apart. Determinism: grad_mixes depends on its
// token alone, the sums are class R. Bytes per token: 12*n.
struct HeadMixBackward {
  Tensor grad_pre{};        // F32[T, n]
  Tensor mixes{};           // F32[T, n]
  Tensor scale{};           // F32[1]
  Tensor base{};            // F32[n]
  Tensor grad_scale_acc{};  // F32[1], optional
  Tensor grad_base_acc{};   // F32[n], optional
  Tensor grad_mixes{};      // out: F32[T, n]
  Tensor grad_scale{};      // out: F32[1]; may be grad_scale_acc
  Tensor grad_base{};       // out: F32[n]; may be grad_base_acc
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void head_mix_bwd(Context& context, const HeadMixBackward& params);
EHC_API size_t workspace_bytes(const Context& context, const HeadMixBackward& params);

}  // namespace ehc::mhc
