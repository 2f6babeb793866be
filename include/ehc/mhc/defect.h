// mhc.defect: how far mixing maps are from doubly stochastic.
#pragma once

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::mhc {

// Per token, with m = comb[t] ([input stream, output stream]):
//   row_defect = max over i of |sum_o m[i,o] - 1|     column_defect = max over o of |sum_i m[i,o] -
//   1| spectral_bound = sqrt(max over i of sum_o |m[i,o]| * max over o of sum_i |m[i,o]|)
// which the largest singular value does not exceed. Sums ascend from +0. NaN stays NaN.
//
// n is 1..8. T may be several leading dimensions. Strides are free but for the last dimension.
// Aliasing: none. Determinism: a token depends on itself alone, the same bits for any number of
// threads. Bytes per token: 4*(n*n+3). Contract 2.15.
struct Defect {
  Tensor comb{};            // F32[T, n, n]
  Tensor row_defect{};      // out: F32[T]
  Tensor column_defect{};   // out: F32[T]
  Tensor spectral_bound{};  // out: F32[T]
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void defect(Context& context, const Defect& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const Defect& params);

}  // namespace ehc::mhc
