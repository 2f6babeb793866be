// mhc.sinkhorn_fwd, mhc.sinkhorn_bwd: logits made a matrix whose rows and columns sum to 1.
#pragma once

#include <cstdint>
#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::mhc {

// A row is the last axis. A half-step divides every line by its sum, rows and columns in turn:
//   deepseek  y = softmax(row) + eps; column; repeat - 1 times row, column; by sum + eps
//   megatron  y = exp(logit - row maximum); repeat times row, column; by max(sum, eps)
//   log       the same as megatron on logarithms and without eps, which is ignored
enum class SinkhornConvention { deepseek, megatron, log };

// comb of every token. n is 1..8. T may be several leading dimensions. All is fp32; divisions are
// true divisions. The last half-step is a column step: columns sum to 1 up to eps, rows as far as
// `repeat` brings them. A NaN spreads over its token's matrix.
//
// Strides are free but for the last dimension. Aliasing: none. Determinism: a token depends on
// itself alone; same bits for any threads, strides, alignment. Bytes per token: 8*n*n.
// Contract 2.7.
struct SinkhornForward {
  Tensor comb_logits{};             // F32[T, n, n]
  Tensor comb{};                    // out: F32[T, n, n]
  std::optional<int64_t> repeat{};  // 1..64, required
  std::optional<double> eps{};      // >= 0, required
  SinkhornConvention convention = SinkhornConvention::deepseek;
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void sinkhorn_fwd(Context& context, const SinkhornForward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const SinkhornForward& params);

// The gradient of the logits, half-step by half-step backwards. y' = y / (s + eps) passes on
// (g - sum over the line of g y') / (s + eps); a sum that max(sum, eps) clamps passes on nothing,
// nor does the row maximum. The divisors are kept and earlier iterates rebuilt by multiplication.
//
// Strides, aliasing and determinism as above. Bytes per token: 12*n*n.
struct SinkhornBackward {
  Tensor grad_comb{};               // F32[T, n, n]
  Tensor comb_logits{};             // F32[T, n, n]
  Tensor grad_comb_logits{};        // out: F32[T, n, n]
  std::optional<int64_t> repeat{};  // 1..64, required
  std::optional<double> eps{};      // >= 0, required
  SinkhornConvention convention = SinkhornConvention::deepseek;
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void sinkhorn_bwd(Context& context, const SinkhornBackward& params);
EHC_API size_t workspace_bytes(const Context& context, const SinkhornBackward& params);

}  // namespace ehc::mhc
