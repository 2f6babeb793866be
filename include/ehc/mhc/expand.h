// mhc.expand_fwd, mhc.expand_bwd: one hidden state becomes n streams.
#pragma once

#include <cstdint>
#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::mhc {

// residual[t,i,:] = hidden[t,:] for all n streams, bit for bit.
//
// A is BF16, F16 or F32, one type per call. T may be several leading dimensions. Strides are free
// but for the last dimension. Aliasing: none. Determinism: exact. Bytes per token in 16-bit types:
// 2(1+n)*d. Contract 2.1.
struct ExpandForward {
  Tensor hidden{};             // A[T, d]
  Tensor residual{};           // out: A[T, n, d]
  std::optional<int64_t> n{};  // [1, 8], required
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void expand_fwd(Context& context, const ExpandForward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const ExpandForward& params);

// grad_hidden[t,:] = round(sum_i grad_residual[t,i,:]), fp32, ascending i from +0. n is 1..8.
// Layout, aliasing and bytes as above; class E: every element the same bits on every implementation
// but the double reference. Contract 2.1.
struct ExpandBackward {
  Tensor grad_residual{};  // A[T, n, d]
  Tensor grad_hidden{};    // out: A[T, d]
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void expand_bwd(Context& context, const ExpandBackward& params);
EHC_API size_t workspace_bytes(const Context& context, const ExpandBackward& params);

}  // namespace ehc::mhc
