#include "ehc/mhc/pre.h"

#include "core/registry.h"
#include "ops/mhc/shared/entry_bwd_call.h"
#include "ops/mhc/shared/sublayer_list.h"
#include "ops/mhc/shared/sublayer_tables.h"

namespace ehc::mhc {

namespace {

using F = PreForward;
using B = PreBackward;
using HF = HeadForward;
using HB = HeadBackward;

// --- pre ---

constexpr auto kForwardTable = table(
    "mhc.pre_fwd", "2.13", "entry of a sublayer: from streams to its input and coefficients",
    in<&F::residual>("residual", "A[T,n,d]"), weights_of_sublayer<F>(), rules_of_sublayer<F>(),
    call_flag("save"), out<&F::layer_input>("layer_input", "A[T,d]"),
    out<&F::post>("post", "F32[T,n]"), out<&F::state, &MixState::comb>("comb", "F32[T,n,n]"),
    out<&F::state, &MixState::pre>("pre", "F32[T,n]", "save"), saved_sums<&F::state>(kOwnState),
    all_or_none("pre mixes mul sqr comb_logits"), flops_of_entry(), flops("2*T*K"));

constexpr auto kBackwardTable = table(
    "mhc.pre_bwd", "2.13", "gradients of the entry of a sublayer",
    in<&B::grad_layer_input>("grad_layer_input", "A[T,d]").optional(),
    in<&B::grad_post>("grad_post", "F32[T,n]").optional(),
    in<&B::grad_comb>("grad_comb", "F32[T,n,n]").optional(),
    in<&B::residual>("residual", "A[T,n,d]"), weights_of_sublayer<B>(),
    in<&B::grad_residual_acc>("grad_residual_acc", "A[T,n,d]").optional(), targets_of_sublayer<B>(),
    saved_state<&B::state>(kOwnState), all_or_none("pre mixes mul sqr comb_logits comb"),
    rules_of_sublayer<B>(), attribute<&B::rounding>("rounding", "once/chain"),
    out<&B::grad_residual>("grad_residual", "A[T,n,d]").may_alias("grad_residual_acc"),
    gradients_of_sublayer<B>(), flops_of_entry_bwd("!mixes"));

// The arrays of one call and its steps, with SublayerKernels or DeviceKernels.
template <class Kernels>
struct PreForwardCall {
  const F& p;
  Workspace workspace;
  EntryArgs args;
  EntryState state;
  Entry<Kernels> entry;

  PreForwardCall(const Call& call, const Kernels& kernels, void* memory)
      : p(*static_cast<const F*>(call.params)),
        workspace(memory),
        args(entry_args(p, call.bound, stream_rows(p.residual))),
        state(entry_state(args, p.state, p.post, false, workspace)),
        entry(call.context, kernels, args, workspace) {}

  void run(const Kernels& kernels) const {
    const PreApplyForwardArgs collapse = collapse_args(args, state.pre, stream_rows(p.layer_input));
    entry.prepare();
    if constexpr (Kernels::kIsDevice) {
      if (!p.state.mixes) return entry.run_fused(state, collapse, kNothing);
    }
    entry.run(state, collapse.layer_input, kNothing,
              [&](const Tile& tile) { kernels.collapse(collapse, tile); });
  }
};

template <class Kernels>
struct PreBackwardCall {
  const B& p;
  Workspace workspace;
  EntryArgs args;
  EntryState state;
  Entry<Kernels> entry;
  EntryBackward<Kernels> backward;

  PreBackwardCall(const Call& call, const Kernels& kernels, void* memory)
      : p(*static_cast<const B*>(call.params)),
        workspace(memory),
        args(entry_args(p, call.bound, stream_rows(p.residual))),
        state(entry_state(args, p.state, {}, true, workspace)),
        entry(call.context, kernels, args, workspace),
        backward(call.context, kernels, entry, state,
                 {.grad_layer_input = stream_rows(p.grad_layer_input),
                  .grad_pre = {},
                  .grad_post = coefficients(p.grad_post),
                  .grad_comb = coefficients(p.grad_comb),
                  .grad_streams = stream_rows(p.grad_residual_acc),
                  .grad_out = stream_rows(p.grad_residual),
                  .collapse = Collapse::own,
                  .earlier_pre = {},
                  .grad_earlier_pre = {},
                  .chain = p.rounding == Rounding::chain,
                  .parameters = parameter_gradients(p)},
                 workspace) {}

  void run(const Kernels&) const {
    entry.prepare();
    if (!p.state.mixes) entry.run(state, {}, kNothing, kNothing);
    backward.run();
  }
};

// --- head ---

template <class P>
constexpr auto head_inputs() {
  return std::tuple{in<&P::residual>("residual", "A[T,n,d]"),
                    in<&P::weights, &MixWeights::fn>("fn", "F32[n,K]"),
                    in<&P::weights, &MixWeights::scale>("scale", "F32[1]"),
                    in<&P::weights, &MixWeights::base>("base", "F32[n]"),
                    in<&P::weights, &MixWeights::norm_weight>("norm_weight", "F32[K]").optional()};
}

template <class P>
constexpr auto head_rules() {
  return std::tuple{attribute<&P::norm_eps>("norm_eps").positive(),
                    attribute<&P::rms>("rms", "mean/norm"),
                    attribute<&P::pre_eps>("pre_eps").at_least(0),
                    attribute<&P::precision>("precision", "fp32/tf32")};
}

constexpr auto kHeadForwardTable =
    table("mhc.head_fwd", "2.13", "streams collapsed for the head of the model", head_inputs<HF>(),
          head_rules<HF>(), out<&HF::hidden>("hidden", "A[T,d]"), flops("T*(2*K*(n+2)+5*n)"),
          flops("n*K", "norm_weight"));

constexpr auto kHeadBackwardTable = table(
    "mhc.head_bwd", "2.13", "gradients of the collapse for the head",
    in<&HB::grad_hidden>("grad_hidden", "A[T,d]"), head_inputs<HB>(),
    in<&HB::targets, &MixGradients::grad_fn>("grad_fn_acc", "F32[n,K]").optional(),
    in<&HB::targets, &MixGradients::grad_scale>("grad_scale_acc", "F32[1]").optional(),
    in<&HB::targets, &MixGradients::grad_base>("grad_base_acc", "F32[n]").optional(),
    in<&HB::targets, &MixGradients::grad_norm_weight>("grad_norm_weight_acc", "F32[K]").optional(),
    head_rules<HB>(), attribute<&HB::rounding>("rounding", "once/chain"),
    out<&HB::grad_residual>("grad_residual", "A[T,n,d]"),
    out<&HB::gradients, &MixGradients::grad_fn>("grad_fn", "F32[n,K]").may_alias("grad_fn_acc"),
    out<&HB::gradients, &MixGradients::grad_scale>("grad_scale", "F32[1]")
        .may_alias("grad_scale_acc"),
    out<&HB::gradients, &MixGradients::grad_base>("grad_base", "F32[n]").may_alias("grad_base_acc"),
    out<&HB::gradients, &MixGradients::grad_norm_weight>("grad_norm_weight", "F32[K]",
                                                         "norm_weight")
        .may_alias("grad_norm_weight_acc"),
    // The projection and its mixes again, then backwards.
    flops("T*(2*K*(n+1)+5*n)"), flops("T*(K*(4*n+6)+13*n+5)"), flops("4*n*K", "norm_weight"));

template <class Kernels>
struct HeadForwardCall {
  const HF& p;
  Workspace workspace;
  EntryArgs args;
  EntryState state;
  Entry<Kernels> entry;

  HeadForwardCall(const Call& call, const Kernels& kernels, void* memory)
      : p(*static_cast<const HF*>(call.params)),
        workspace(memory),
        args(head_args(p, call.bound)),
        state(entry_state(args, {}, {}, false, workspace)),
        entry(call.context, kernels, args, workspace) {}

  void run(const Kernels& kernels) const {
    const PreApplyForwardArgs collapse = collapse_args(args, state.pre, stream_rows(p.hidden));
    entry.prepare();
    entry.run(state, collapse.layer_input, kNothing,
              [&](const Tile& tile) { kernels.collapse(collapse, tile); });
  }
};

template <class Kernels>
struct HeadBackwardCall {
  const HB& p;
  Workspace workspace;
  EntryArgs args;
  EntryState state;
  Entry<Kernels> entry;
  EntryBackward<Kernels> backward;

  HeadBackwardCall(const Call& call, const Kernels& kernels, void* memory)
      : p(*static_cast<const HB*>(call.params)),
        workspace(memory),
        args(head_args(p, call.bound)),
        state(entry_state(args, {}, {}, true, workspace)),
        entry(call.context, kernels, args, workspace),
        backward(call.context, kernels, entry, state,
                 {.grad_layer_input = stream_rows(p.grad_hidden),
                  .grad_pre = {},
                  .grad_post = {},
                  .grad_comb = {},
                  .grad_streams = {},
                  .grad_out = stream_rows(p.grad_residual),
                  .collapse = Collapse::own,
                  .earlier_pre = {},
                  .grad_earlier_pre = {},
                  .chain = p.rounding == Rounding::chain,
                  .parameters = parameter_gradients(p)},
                 workspace) {}

  void run(const Kernels&) const {
    entry.prepare();
    entry.run(state, {}, kNothing, kNothing);
    backward.run();
  }
};

constexpr Operator kPreForward =
    make_operator<F>(kForwardTable, kSublayerImplementations<PreForwardCall>);
constexpr Operator kPreBackward = [] {
  Operator op = make_operator<B>(kBackwardTable, kSublayerImplementations<PreBackwardCall>);
  op.rules = &check_targets<B>;
  return op;
}();
constexpr Operator kHeadForward =
    make_operator<HF>(kHeadForwardTable, kSublayerImplementations<HeadForwardCall>);
constexpr Operator kHeadBackward = [] {
  Operator op = make_operator<HB>(kHeadBackwardTable, kSublayerImplementations<HeadBackwardCall>);
  op.rules = &check_targets<HB>;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(pre_fwd, PreForward, kPreForward);
EHC_DEFINE_CALLS(pre_bwd, PreBackward, kPreBackward);
EHC_DEFINE_CALLS(head_fwd, HeadForward, kHeadForward);
EHC_DEFINE_CALLS(head_bwd, HeadBackward, kHeadBackward);
EHC_REGISTER(pre, &kPreForward, &kPreBackward, &kHeadForward, &kHeadBackward);

}  // namespace ehc::mhc
