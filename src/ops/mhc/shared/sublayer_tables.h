// Parts of tables that the operators around a sublayer share, and the rules that a table cannot
// say. Their structs have members of the same names, see ehc/mhc/sublayer.h.
#pragma once

#include <string_view>
#include <tuple>

#include "core/operator.h"
#include "ehc/mhc/sublayer.h"
#include "ops/mhc/shared/mix_group.h"

namespace ehc::mhc {

// FN: parameters of the entry.
template <class P>
constexpr auto weights_of_sublayer() {
  return std::tuple{in<&P::weights, &MixWeights::fn>("fn", "F32[N,K]"),
                    in<&P::weights, &MixWeights::scale>("scale", "F32[3]"),
                    in<&P::weights, &MixWeights::base>("base", "F32[N]"),
                    in<&P::weights, &MixWeights::norm_weight>("norm_weight", "F32[K]").optional(),
                    in<&P::layer_norm_weight>("layer_norm_weight", "W[d]").optional()};
}

// MIX and PREC, and the eps of the layer norm.
template <class P>
constexpr auto rules_of_sublayer() {
  return std::tuple{mix_group<MixRules, &P::rules>(),
                    attribute<&P::precision>("precision", "fp32/tf32"),
                    attribute<&P::layer_norm_eps>("layer_norm_eps")
                        .positive()
                        .required_with("layer_norm_weight")};
}

// FNACC: what gradients of the parameters are added to.
template <class P>
constexpr auto targets_of_sublayer() {
  return std::tuple{
      in<&P::targets, &MixGradients::grad_fn>("grad_fn_acc", "F32[N,K]").optional(),
      in<&P::targets, &MixGradients::grad_scale>("grad_scale_acc", "F32[3]").optional(),
      in<&P::targets, &MixGradients::grad_base>("grad_base_acc", "F32[N]").optional(),
      in<&P::targets, &MixGradients::grad_norm_weight>("grad_norm_weight_acc", "F32[K]").optional(),
      in<&P::grad_layer_norm_weight_acc>("grad_layer_norm_weight_acc", "F32[d]").optional()};
}

// GFN: gradients of the parameters.
template <class P>
constexpr auto gradients_of_sublayer() {
  return std::tuple{
      out<&P::gradients, &MixGradients::grad_fn>("grad_fn", "F32[N,K]").may_alias("grad_fn_acc"),
      out<&P::gradients, &MixGradients::grad_scale>("grad_scale", "F32[3]")
          .may_alias("grad_scale_acc"),
      out<&P::gradients, &MixGradients::grad_base>("grad_base", "F32[N]")
          .may_alias("grad_base_acc"),
      out<&P::gradients, &MixGradients::grad_norm_weight>("grad_norm_weight", "F32[K]",
                                                          "norm_weight")
          .may_alias("grad_norm_weight_acc"),
      out<&P::grad_layer_norm_weight>("grad_layer_norm_weight", "F32[d]", "layer_norm_weight")
          .may_alias("grad_layer_norm_weight_acc")};
}

// A target has no use without the parameter.
template <class P>
void check_targets(const Schema& schema, const Bound&, const void* params) {
  const P& p = *static_cast<const P*>(params);
  const auto check = [&](const char* name, const Tensor& target, const char* parameter,
                         const Tensor& given) {
    if (!target || given) return;
    fail_tensor(schema, name, std::string("none without '") + parameter + "'", describe(target));
  };
  check("grad_norm_weight_acc", p.targets.grad_norm_weight, "norm_weight", p.weights.norm_weight);
  if constexpr (requires { p.layer_norm_weight; }) {
    check("grad_layer_norm_weight_acc", p.grad_layer_norm_weight_acc, "layer_norm_weight",
          p.layer_norm_weight);
  }
}

// How a saved state is called: in the operators that begin with an entry, and in the seams.
struct StateNames {
  std::string_view pre, mixes, mul, sqr, comb_logits, comb;
};
inline constexpr StateNames kOwnState = {"pre", "mixes", "mul", "sqr", "comb_logits", "comb"};
inline constexpr StateNames kNextState = {"next_pre", "next_mixes",       "next_mul",
                                          "next_sqr", "next_comb_logits", "next_comb"};

// SAVED and NSAVED: the state as an input, all of it or none.
template <auto State>
constexpr auto saved_state(const StateNames& name) {
  return std::tuple{in<State, &MixState::pre>(name.pre, "F32[T,n]").optional(),
                    in<State, &MixState::mixes>(name.mixes, "F32[T,N]").optional(),
                    in<State, &MixState::mul>(name.mul, "F32[T,N]").optional(),
                    in<State, &MixState::sqr>(name.sqr, "F32[T]").optional(),
                    in<State, &MixState::comb_logits>(name.comb_logits, "F32[T,n,n]").optional(),
                    in<State, &MixState::comb>(name.comb, "F32[T,n,n]").optional()};
}

// The part of the state that a forward makes only when it saves: all but comb and, where that is an
// output of its own, pre.
template <auto State>
constexpr auto saved_sums(const StateNames& name) {
  return std::tuple{out<State, &MixState::mixes>(name.mixes, "F32[T,N]", "save"),
                    out<State, &MixState::mul>(name.mul, "F32[T,N]", "save"),
                    out<State, &MixState::sqr>(name.sqr, "F32[T]", "save"),
                    out<State, &MixState::comb_logits>(name.comb_logits, "F32[T,n,n]", "save")};
}

// Operations of an entry: the projection, the norm of its sums, split and Sinkhorn, and the norm
// weights where there are some. The collapse comes apart.
constexpr auto flops_of_entry() {
  return std::tuple{flops("T*(2*K*(N+1)+5*N)"), flops(kSinkhornFlops), flops("N*K", "norm_weight"),
                    flops("4*T*d", "layer_norm_weight")};
}

// Backwards, the collapse with it; once more forwards `unless` there is a saved state.
constexpr auto flops_of_entry_bwd(std::string_view unless) {
  return std::tuple{flops("T*K*(4*N+6)"),
                    flops("T*(3*N+5+n*(4*n+21))"),
                    flops(kSinkhornBackwardFlops),
                    flops("4*N*K", "norm_weight"),
                    flops("8*T*d", "layer_norm_weight"),
                    flops("T*(2*K*(N+1)+5*N)", unless),
                    flops(kSinkhornFlops, unless)};
}

}  // namespace ehc::mhc
