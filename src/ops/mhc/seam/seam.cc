#include "ehc/mhc/seam.h"

#include "core/registry.h"
#include "ops/mhc/shared/entry_bwd_call.h"
#include "ops/mhc/shared/streams_of_mixes.h"
#include "ops/mhc/shared/sublayer_list.h"
#include "ops/mhc/shared/sublayer_tables.h"

namespace ehc::mhc {

namespace {

using CF = SeamClassicForward;
using CB = SeamClassicBackward;
using SF = SeamSinglePassForward;
using SB = SeamSinglePassBackward;
using BF = SeamBroadcastForward;
using BB = SeamBroadcastBackward;

// --- tables of classic and single_pass ---

template <class P>
constexpr auto rows_of_exit() {
  return std::tuple{in<&P::layer_output>("layer_output", "A[T,d]"),
                    in<&P::residual>("residual", "A[T,n,d]")};
}

template <class P>
constexpr auto coefficients_of_exit() {
  return std::tuple{in<&P::post>("post", "F32[T,n]"), in<&P::comb>("comb", "F32[T,n,n]")};
}

template <class P>
constexpr auto rows_of_seam() {
  return std::tuple{out<&P::new_residual>("new_residual", "A[T,n,d]"),
                    out<&P::layer_input>("layer_input", "A[T,d]")};
}

template <class P>
constexpr auto saved_by_seam() {
  return std::tuple{in<&P::new_residual>("new_residual", "A[T,n,d]").optional(),
                    saved_state<&P::next_state>(kNextState),
                    all_or_none("new_residual next_pre next_mixes next_mul next_sqr "
                                "next_comb_logits next_comb")};
}

template <class P>
constexpr auto gradients_of_exit_rows() {
  return std::tuple{out<&P::grad_layer_output>("grad_layer_output", "A[T,d]"),
                    out<&P::grad_residual>("grad_residual", "A[T,n,d]")};
}

template <class P>
constexpr auto gradients_of_exit_coefficients() {
  return std::tuple{out<&P::grad_post>("grad_post", "F32[T,n]"),
                    out<&P::grad_comb>("grad_comb", "F32[T,n,n]")};
}

constexpr auto flops_of_exit_and_collapse() {
  return std::tuple{flops("T*d*(2*n*n+n)"), flops("2*T*n*d")};
}

constexpr auto flops_of_exit_bwd() {
  return std::tuple{flops("4*T*d*n*(n+1)"), flops("T*d*(2*n*n+n)", "!new_residual")};
}

constexpr auto kClassicForwardTable =
    table("mhc.seam_classic_fwd", "models 1.1", "post of a sublayer and pre of the next one",
          rows_of_exit<CF>(), coefficients_of_exit<CF>(), weights_of_sublayer<CF>(),
          rules_of_sublayer<CF>(), call_flag("save"), rows_of_seam<CF>(),
          out<&CF::next_post>("next_post", "F32[T,n]"),
          out<&CF::next_state, &MixState::comb>("next_comb", "F32[T,n,n]"),
          out<&CF::next_state, &MixState::pre>("next_pre", "F32[T,n]", "save"),
          saved_sums<&CF::next_state>(kNextState),
          all_or_none("next_pre next_mixes next_mul next_sqr next_comb_logits"), flops_of_entry(),
          flops_of_exit_and_collapse());

constexpr auto kSinglePassForwardTable =
    table("mhc.seam_single_pass_fwd", "models 1.2",
          "the same with a collapse whose mix was made one sublayer earlier", rows_of_exit<SF>(),
          in<&SF::pre>("pre", "F32[T,n]"), coefficients_of_exit<SF>(), weights_of_sublayer<SF>(),
          rules_of_sublayer<SF>(), call_flag("save"), rows_of_seam<SF>(),
          out<&SF::next_state, &MixState::pre>("next_pre", "F32[T,n]"),
          out<&SF::next_post>("next_post", "F32[T,n]"),
          out<&SF::next_state, &MixState::comb>("next_comb", "F32[T,n,n]"),
          saved_sums<&SF::next_state>(kNextState),
          all_or_none("next_mixes next_mul next_sqr next_comb_logits"), flops_of_entry(),
          flops_of_exit_and_collapse());

constexpr auto kClassicBackwardTable =
    table("mhc.seam_classic_bwd", "models 1.1", "gradients of seam_classic_fwd",
          in<&CB::grad_new_residual>("grad_new_residual", "A[T,n,d]").optional(),
          in<&CB::grad_layer_input>("grad_layer_input", "A[T,d]").optional(),
          in<&CB::grad_next_post>("grad_next_post", "F32[T,n]").optional(),
          in<&CB::grad_next_comb>("grad_next_comb", "F32[T,n,n]").optional(), rows_of_exit<CB>(),
          coefficients_of_exit<CB>(), weights_of_sublayer<CB>(), targets_of_sublayer<CB>(),
          saved_by_seam<CB>(), rules_of_sublayer<CB>(),
          attribute<&CB::rounding>("rounding", "once/chain"), gradients_of_exit_rows<CB>(),
          gradients_of_exit_coefficients<CB>(), gradients_of_sublayer<CB>(),
          flops_of_entry_bwd("!next_mixes"), flops_of_exit_bwd());

constexpr auto kSinglePassBackwardTable =
    table("mhc.seam_single_pass_bwd", "models 1.2", "gradients of seam_single_pass_fwd",
          in<&SB::grad_new_residual>("grad_new_residual", "A[T,n,d]").optional(),
          in<&SB::grad_layer_input>("grad_layer_input", "A[T,d]").optional(),
          in<&SB::grad_next_pre>("grad_next_pre", "F32[T,n]").optional(),
          in<&SB::grad_next_post>("grad_next_post", "F32[T,n]").optional(),
          in<&SB::grad_next_comb>("grad_next_comb", "F32[T,n,n]").optional(), rows_of_exit<SB>(),
          in<&SB::pre>("pre", "F32[T,n]"), coefficients_of_exit<SB>(), weights_of_sublayer<SB>(),
          targets_of_sublayer<SB>(), saved_by_seam<SB>(), rules_of_sublayer<SB>(),
          attribute<&SB::rounding>("rounding", "once/chain"), gradients_of_exit_rows<SB>(),
          out<&SB::grad_pre>("grad_pre", "F32[T,n]"), gradients_of_exit_coefficients<SB>(),
          gradients_of_sublayer<SB>(), flops_of_entry_bwd("!next_mixes"), flops_of_exit_bwd());

// --- calls of classic and single_pass ---

// Does the struct have a mix that was made one sublayer earlier?
template <class P>
constexpr bool has_earlier_pre = requires(P p) {
  p.pre;
};

template <class P>
Coefficients earlier_pre(const P& p) {
  if constexpr (has_earlier_pre<P>) {
    return coefficients(p.pre);
  } else {
    return {};
  }
}

template <class P>
PostForwardArgs exit_args(const P& p, const EntryArgs& entry) {
  return {.sizes = entry.sizes,
          .layer_output = stream_rows(p.layer_output),
          .residual = stream_rows(p.residual),
          .post = coefficients(p.post),
          .comb = coefficients(p.comb),
          .new_residual = entry.streams};
}

template <class P, class Kernels>
struct SeamForwardCall {
  const P& p;
  Workspace workspace;
  EntryArgs args;
  EntryState state;
  Entry<Kernels> entry;

  SeamForwardCall(const Call& call, const Kernels& kernels, void* memory)
      : p(*static_cast<const P*>(call.params)),
        workspace(memory),
        args(entry_args(p, call.bound, stream_rows(p.new_residual))),
        state(entry_state(args, p.next_state, p.next_post, false, workspace)),
        entry(call.context, kernels, args, workspace) {}

  void run(const Kernels& kernels) const {
    const PostForwardArgs exit = exit_args(p, args);
    const PreApplyForwardArgs collapse = collapse_args(
        args, has_earlier_pre<P> ? earlier_pre(p) : state.pre, stream_rows(p.layer_input));
    const auto make = [&](const Tile& tile) { kernels.post(exit, tile); };
    entry.prepare();
    if constexpr (Kernels::kIsDevice && !has_earlier_pre<P>) {
      if (!p.next_state.mixes) return entry.run_fused(state, collapse, make);
    }
    entry.run(state, collapse.layer_input, make,
              [&](const Tile& tile) { kernels.collapse(collapse, tile); });
  }
};

// The new streams, in the workspace where the tensor is not there.
StreamRows streams_or_room(const Tensor& tensor, const Bound& bound, Workspace& workspace) {
  if (tensor) return stream_rows(tensor);
  const StreamSizes sizes = stream_sizes(bound);
  return take_rows(workspace, sizes, sizes.streams, sizes.activation);
}

template <class P, class Kernels>
struct SeamBackwardCall {
  const P& p;
  Workspace workspace;
  EntryArgs args;
  EntryState state;
  Entry<Kernels> entry;
  EntryBackward<Kernels> backward;

  SeamBackwardCall(const Call& call, const Kernels& kernels, void* memory)
      : p(*static_cast<const P*>(call.params)),
        workspace(memory),
        args(entry_args(p, call.bound, streams_or_room(p.new_residual, call.bound, workspace))),
        state(entry_state(args, p.next_state, {}, true, workspace)),
        entry(call.context, kernels, args, workspace),
        backward(call.context, kernels, entry, state, entry_gradients(), workspace) {}

  [[nodiscard]] EntryBackwardArgs entry_gradients() const {
    EntryBackwardArgs b;
    b.grad_layer_input = stream_rows(p.grad_layer_input);
    b.grad_post = coefficients(p.grad_next_post);
    b.grad_comb = coefficients(p.grad_next_comb);
    b.grad_streams = stream_rows(p.grad_new_residual);
    if constexpr (has_earlier_pre<P>) {
      b.grad_pre = coefficients(p.grad_next_pre);
      b.collapse = Collapse::earlier;
      b.earlier_pre = coefficients(p.pre);
      b.grad_earlier_pre = coefficients(p.grad_pre);
    }
    b.in_blocks = true;
    b.chain = p.rounding == Rounding::chain;
    b.parameters = parameter_gradients(p);
    return b;
  }

  void run(const Kernels& kernels) const {
    const PostForwardArgs exit = exit_args(p, args);
    entry.prepare();
    if (!p.next_state.mixes) {
      entry.run(
          state, {}, [&](const Tile& tile) { kernels.post(exit, tile); }, kNothing);
    }
    const PostBackwardArgs gradients = {
        .sizes = exit.sizes,
        .grad_new_residual = {},
        .layer_output = exit.layer_output,
        .residual = exit.residual,
        .post = exit.post,
        .comb = exit.comb,
        .grad_layer_output = stream_rows(p.grad_layer_output),
        .grad_residual = stream_rows(p.grad_residual),
        .grad_post = coefficients(p.grad_post),
        .grad_comb = coefficients(p.grad_comb),
        .streaming = exceeds_cache(exit.sizes, 3 * exit.sizes.streams + 2)};
    backward.run_blocks([&](const GradientRows& grad_new_residual, int64_t begin, int64_t end) {
      PostBackwardArgs of_block = gradients;
      of_block.grad_new_residual = grad_new_residual;
      kernels.post_bwd(of_block, begin, end);
    });
  }
};

template <class Kernels>
using ClassicForwardCall = SeamForwardCall<CF, Kernels>;
template <class Kernels>
using ClassicBackwardCall = SeamBackwardCall<CB, Kernels>;
template <class Kernels>
using SinglePassForwardCall = SeamForwardCall<SF, Kernels>;
template <class Kernels>
using SinglePassBackwardCall = SeamBackwardCall<SB, Kernels>;

// --- broadcast ---

constexpr auto kBroadcastForwardTable = table(
    "mhc.seam_broadcast_fwd", "models 1.3", "first entry of a stack, whose streams are all one row",
    in<&BF::hidden>("hidden", "A[T,d]"), weights_of_sublayer<BF>(), rules_of_sublayer<BF>(),
    attribute<&BF::form>("form", "classic/single_pass"), call_flag("save"),
    out<&BF::residual>("residual", "A[T,n,d]"), out<&BF::layer_input>("layer_input", "A[T,d]"),
    out<&BF::state, &MixState::pre>("pre", "F32[T,n]"), out<&BF::post>("post", "F32[T,n]"),
    out<&BF::state, &MixState::comb>("comb", "F32[T,n,n]"), saved_sums<&BF::state>(kOwnState),
    all_or_none("mixes mul sqr comb_logits"),
    // The parts of fn are added once; so the projection is d wide.
    flops("N*K"), flops("T*(2*d*(N+1)+5*N)"), flops(kSinkhornFlops),
    flops("2*T*n*d", "form=classic"), flops("N*K", "norm_weight"),
    flops("4*T*d", "layer_norm_weight"));

constexpr auto kBroadcastBackwardTable =
    table("mhc.seam_broadcast_bwd", "models 1.3", "gradients of seam_broadcast_fwd",
          in<&BB::grad_residual>("grad_residual", "A[T,n,d]").optional(),
          in<&BB::grad_layer_input>("grad_layer_input", "A[T,d]").optional(),
          in<&BB::grad_pre>("grad_pre", "F32[T,n]").optional(),
          in<&BB::grad_post>("grad_post", "F32[T,n]").optional(),
          in<&BB::grad_comb>("grad_comb", "F32[T,n,n]").optional(),
          in<&BB::hidden>("hidden", "A[T,d]"), weights_of_sublayer<BB>(), targets_of_sublayer<BB>(),
          saved_state<&BB::state>(kOwnState), all_or_none("pre mixes mul sqr comb_logits comb"),
          rules_of_sublayer<BB>(), attribute<&BB::form>("form", "classic/single_pass"),
          out<&BB::grad_hidden>("grad_hidden", "A[T,d]"), gradients_of_sublayer<BB>(), flops("N*K"),
          flops("T*d*(4*N+2+n)"), flops("4*T*n*d", "form=classic"), flops("T*(3*N+5+n*(4*n+21))"),
          flops(kSinkhornBackwardFlops), flops("4*N*K", "norm_weight"),
          flops("8*T*d", "layer_norm_weight"), flops("T*(2*d*(N+1)+5*N)", "!mixes"),
          flops(kSinkhornFlops, "!mixes"));

// n follows from N = n*n + 2n; K must too.
template <class P, const Table& table>
void find_streams(Bound& bound, const void* params) {
  const int64_t n = streams_of_mixes(bound["N"]);
  if (n < 1 || bound["K"] % n != 0 || bound["K"] / n != bound["d"]) {
    fail_tensor(table.view(), "fn", "F32[N,n*d] with N = n*n + 2*n",
                describe(static_cast<const P*>(params)->weights.fn));
  }
  bound.symbols.set(symbol("n"), n);
}

template <class Kernels>
struct BroadcastForwardCall {
  const BF& p;
  Workspace workspace;
  EntryArgs args;
  EntryState state;
  Entry<Kernels> entry;

  BroadcastForwardCall(const Call& call, const Kernels& kernels, void* memory)
      : p(*static_cast<const BF*>(call.params)),
        workspace(memory),
        args(entry_args(p, call.bound, stream_rows(p.hidden), /*is_broadcast=*/true)),
        state(entry_state(args, p.state, p.post, false, workspace)),
        entry(call.context, kernels, args, workspace) {}

  void run(const Kernels& kernels) const {
    const StreamRows layer_input = stream_rows(p.layer_input);
    const PreApplyForwardArgs collapse = collapse_args(args, state.pre, layer_input);
    const ExpandForwardArgs expand = {args.sizes, args.streams, stream_rows(p.residual),
                                      exceeds_cache(args.sizes, args.sizes.streams + 1)};
    const ExpandForwardArgs copy = {args.projected(), args.streams, layer_input, false};
    entry.prepare();
    entry.run(
        state, layer_input, [&](const Tile& tile) { kernels.expand(expand, tile); },
        [&](const Tile& tile) {
          if (p.form == SeamForm::single_pass) return kernels.expand(copy, tile);
          kernels.collapse(collapse, tile);
        });
  }
};

template <class Kernels>
struct BroadcastBackwardCall {
  const BB& p;
  Workspace workspace;
  EntryArgs args;
  EntryState state;
  Entry<Kernels> entry;
  EntryBackward<Kernels> backward;

  BroadcastBackwardCall(const Call& call, const Kernels& kernels, void* memory)
      : p(*static_cast<const BB*>(call.params)),
        workspace(memory),
        args(entry_args(p, call.bound, stream_rows(p.hidden), /*is_broadcast=*/true)),
        state(entry_state(args, p.state, {}, true, workspace)),
        entry(call.context, kernels, args, workspace),
        backward(call.context, kernels, entry, state, entry_gradients(), workspace) {}

  [[nodiscard]] EntryBackwardArgs entry_gradients() const {
    EntryBackwardArgs b;
    b.grad_layer_input = stream_rows(p.grad_layer_input);
    b.grad_pre = coefficients(p.grad_pre);
    b.grad_post = coefficients(p.grad_post);
    b.grad_comb = coefficients(p.grad_comb);
    b.grad_streams = stream_rows(p.grad_residual);
    b.grad_out = stream_rows(p.grad_hidden);
    b.collapse = p.form == SeamForm::classic ? Collapse::own : Collapse::first;
    b.parameters = parameter_gradients(p);
    return b;
  }

  void run(const Kernels&) const {
    entry.prepare();
    if (!p.state.mixes) entry.run(state, {}, kNothing, kNothing);
    backward.run();
  }
};

// --- operators ---

constexpr Operator kClassicForward =
    make_operator<CF>(kClassicForwardTable, kSublayerImplementations<ClassicForwardCall>);
constexpr Operator kSinglePassForward =
    make_operator<SF>(kSinglePassForwardTable, kSublayerImplementations<SinglePassForwardCall>);
constexpr Operator kBroadcastForward = [] {
  Operator op =
      make_operator<BF>(kBroadcastForwardTable, kSublayerImplementations<BroadcastForwardCall>);
  op.derive = &find_streams<BF, kBroadcastForwardTable>;
  return op;
}();
constexpr Operator kClassicBackward = [] {
  Operator op =
      make_operator<CB>(kClassicBackwardTable, kSublayerImplementations<ClassicBackwardCall>);
  op.rules = &check_targets<CB>;
  return op;
}();
constexpr Operator kSinglePassBackward = [] {
  Operator op =
      make_operator<SB>(kSinglePassBackwardTable, kSublayerImplementations<SinglePassBackwardCall>);
  op.rules = &check_targets<SB>;
  return op;
}();
constexpr Operator kBroadcastBackward = [] {
  Operator op =
      make_operator<BB>(kBroadcastBackwardTable, kSublayerImplementations<BroadcastBackwardCall>);
  op.derive = &find_streams<BB, kBroadcastBackwardTable>;
  op.rules = &check_targets<BB>;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(seam_classic_fwd, SeamClassicForward, kClassicForward);
EHC_DEFINE_CALLS(seam_classic_bwd, SeamClassicBackward, kClassicBackward);
EHC_DEFINE_CALLS(seam_single_pass_fwd, SeamSinglePassForward, kSinglePassForward);
EHC_DEFINE_CALLS(seam_single_pass_bwd, SeamSinglePassBackward, kSinglePassBackward);
EHC_DEFINE_CALLS(seam_broadcast_fwd, SeamBroadcastForward, kBroadcastForward);
EHC_DEFINE_CALLS(seam_broadcast_bwd, SeamBroadcastBackward, kBroadcastBackward);
EHC_REGISTER(seam, &kClassicForward, &kClassicBackward, &kSinglePassForward, &kSinglePassBackward,
             &kBroadcastForward, &kBroadcastBackward);

}  // namespace ehc::mhc
