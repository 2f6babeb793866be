// mhc.reduce_partials_fwd, mhc.reduce_partials_bwd: the sums of a projection put together and
// normalised by the RMS of the token.
#pragma once

#include <cstdint>
#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::mhc {

// The factor r of a token, from the sum of squares q of w values:
//   mean  1 / sqrt(q/w + eps)
//   norm  1 / (sqrt(q/w) + eps), as in Megatron
enum class RmsForm { mean, norm };

// mul[t,g,j] = sum_s mul_partial[s,t,g,j]     sqr[t,g] = sum_s sqr_partial[s,t,g]
// mixes[t,j] = sum_g mul[t,g,j] * r[t,g]      r from sqr[t,g] and w = k/G
//
// sum_s adds adjacent pairs, an odd last one moves up unchanged, until one is left; S = 0 gives
// zeros. sum_g ascends from +0 by fma. The axis G is there in all tensors or in none, where it
// counts as 1; it divides k, the number of columns that were projected. M is 1..80. All is fp32.
//
// Strides are free but for the last dimension. Aliasing: none. Determinism: class E, the same bits
// from every implementation but the double reference; a token depends on itself alone. Bytes per
// token: 4*S*G*(M+1) + 4*G*(M+1) + 4*M. Contract 2.4.
struct ReducePartialsForward {
  Tensor mul_partial{};              // F32[S, T, M] or F32[S, T, G, M]
  Tensor sqr_partial{};              // F32[S, T] or F32[S, T, G]
  Tensor mixes{};                    // out: F32[T, M]
  Tensor mul{};                      // out: F32[T, M] or F32[T, G, M]
  Tensor sqr{};                      // out: F32[T] or F32[T, G]
  std::optional<int64_t> k{};        // >= 1, required: the number of columns of all groups
  std::optional<double> norm_eps{};  // > 0, required
  RmsForm rms = RmsForm::mean;
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void reduce_partials_fwd(Context& context, const ReducePartialsForward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const ReducePartialsForward& params);

// With dr[t,g] = sum_j grad_mixes[t,j] * mul[t,g,j]:
//   grad_mul[t,g,j] = grad_mixes[t,j] * r[t,g]
//   grad_sqr[t,g] = -dr * r / (2 * (sqr + eps * w))           form mean
//                   -dr * r^2 / (2 * w * sqrt(sqr/w))         form norm; 0 where sqr is 0
// A split has the gradient of the sum that it is part of, so there is no axis S.
//
// Strides and aliasing as above. Determinism: grad_mul is class E, grad_sqr class R per
// implementation, its sum a tree that depends on M alone. Bytes per token: 8*G*(M+1) + 4*M.
struct ReducePartialsBackward {
  Tensor grad_mixes{};               // F32[T, M]
  Tensor mul{};                      // F32[T, M] or F32[T, G, M]
  Tensor sqr{};                      // F32[T] or F32[T, G]
  Tensor grad_mul{};                 // out: F32[T, M] or F32[T, G, M]
  Tensor grad_sqr{};                 // out: F32[T] or F32[T, G]
  std::optional<int64_t> k{};        // >= 1, required
  std::optional<double> norm_eps{};  // > 0, required
  RmsForm rms = RmsForm::mean;
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void reduce_partials_bwd(Context& context, const ReducePartialsBackward& params);
EHC_API size_t workspace_bytes(const Context& context, const ReducePartialsBackward& params);

}  // namespace ehc::mhc
