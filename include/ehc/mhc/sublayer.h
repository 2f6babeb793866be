// What the operators around a sublayer share: the parameters of its entry, their gradients, and the
// state that a forward hands to its backward.
#pragma once

#include <cstdint>
#include <optional>

#include "ehc/mhc/prenorm_gemm.h"
#include "ehc/mhc/reduce_partials.h"
#include "ehc/mhc/sinkhorn.h"
#include "ehc/tensor.h"

namespace ehc::mhc {

// Parameters of the mixes: N = n*n + 2n mixes and 3 scales (of pre, post, comb) of a sublayer, n
// mixes and one scale of the head.
struct MixWeights {
  Tensor fn{};           // F32[N, n*d]
  Tensor scale{};        // F32[3]
  Tensor base{};         // F32[N]
  Tensor norm_weight{};  // F32[n*d], optional: merged into fn
};

// Their gradients, or what these are added to. grad_norm_weight comes with norm_weight.
struct MixGradients {
  Tensor grad_fn{};           // F32[N, n*d]
  Tensor grad_scale{};        // F32[3]
  Tensor grad_base{};         // F32[N]
  Tensor grad_norm_weight{};  // F32[n*d]
};

// How a projection becomes coefficients.
struct MixRules {
  std::optional<double> norm_eps{};      // > 0, required
  std::optional<double> pre_eps{};       // >= 0, required
  std::optional<double> post_mult{};     // >= 0, required
  std::optional<int64_t> repeat{};       // 1..64, required
  std::optional<double> sinkhorn_eps{};  // >= 0, required
  SinkhornConvention convention = SinkhornConvention::deepseek;
  RmsForm rms = RmsForm::mean;
};

// What a forward saves for its backward. A backward that gets none of it makes all of it again,
// with the same bits.
struct MixState {
  Tensor pre{};          // F32[T, n]
  Tensor mixes{};        // F32[T, N]
  Tensor mul{};          // F32[T, N]
  Tensor sqr{};          // F32[T]
  Tensor comb_logits{};  // F32[T, n, n]
  Tensor comb{};         // F32[T, n, n]
};

// Where the gradient of the streams is rounded to A on its way through a backward.
// once: nowhere but in the outputs.
// chain: after every step, as the operators do that stand for the steps: that of the streams after
// pre_apply and after the projection, that of the collapsed row behind a layer norm.
enum class Rounding { once, chain };

}  // namespace ehc::mhc
