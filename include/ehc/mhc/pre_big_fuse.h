// mhc.pre_big_fuse: everything between the projection and the layer, for inference.
#pragma once

#include <cstdint>
#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/mhc/reduce_partials.h"
#include "ehc/mhc/sinkhorn.h"
#include "ehc/tensor.h"

namespace ehc::mhc {

// reduce_partials_fwd (k = n*d) -> split_fwd -> sinkhorn_fwd -> pre_apply_fwd, bit for bit; what
// they hand on stays inside. With layer_norm_weight the collapsed row c, rounded, is normalised:
//   layer_input = round((c / sqrt(mean c^2 + layer_norm_eps)) * layer_norm_weight)
//
// A is BF16, F16 or F32, W BF16 or F32; n is 1..8, N = n*n + 2n. Strides are free but for the last
// dimension. Aliasing: none. Determinism: a token depends on itself alone; same bits for any
// threads, strides, alignment. Bytes per token in 16-bit types: (2n+2)*d + 4*S*G*(N+1) + 4*(n*n+n).
// Contract 2.9.
struct PreBigFuse {
  Tensor mul_partial{};                    // F32[S, T, N] or F32[S, T, G, N], see prenorm_gemm.h
  Tensor sqr_partial{};                    // F32[S, T] or F32[S, T, G]
  Tensor scale{};                          // F32[3]
  Tensor base{};                           // F32[N]
  Tensor residual{};                       // A[T, n, d]
  Tensor layer_norm_weight{};              // W[d], optional
  Tensor layer_input{};                    // out: A[T, d]
  Tensor post{};                           // out: F32[T, n]
  Tensor comb{};                           // out: F32[T, n, n]
  std::optional<double> norm_eps{};        // > 0, required
  std::optional<double> pre_eps{};         // >= 0, required
  std::optional<double> post_mult{};       // >= 0, required
  std::optional<int64_t> repeat{};         // 1..64, required
  std::optional<double> sinkhorn_eps{};    // >= 0, required
  std::optional<double> layer_norm_eps{};  // > 0, required with layer_norm_weight
  SinkhornConvention convention = SinkhornConvention::deepseek;
  RmsForm rms = RmsForm::mean;
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void pre_big_fuse(Context& context, const PreBigFuse& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const PreBigFuse& params);

}  // namespace ehc::mhc
