// mhc.amax_gain: how much mixing maps can enlarge a signal, alone and all together.
#pragma once

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::mhc {

// Per layer l and token t, with m = comb[l,t] ([input stream, output stream]):
//   forward_gain  = max over o of sum_i |m[i,o]|     backward_gain = max over i of sum_o |m[i,o]|
// and the same of the product comb[0] * comb[1] * ... from left to right (the unit matrix without
// layers), as composite_*. Sums ascend from +0. NaN in a map makes its gains NaN.
//
// n is 1..8. Strides are free but for the last dimension. Aliasing: none. Determinism: a token
// depends on itself alone, the same bits for any number of threads. Bytes per token: 4*L*(n*n+2).
// Contract 2.15.
struct AmaxGain {
  Tensor comb{};                     // F32[L, T, n, n]
  Tensor forward_gain{};             // out: F32[L, T]
  Tensor backward_gain{};            // out: F32[L, T]
  Tensor composite_forward_gain{};   // out: F32[T]
  Tensor composite_backward_gain{};  // out: F32[T]
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void amax_gain(Context& context, const AmaxGain& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const AmaxGain& params);

}  // namespace ehc::mhc
