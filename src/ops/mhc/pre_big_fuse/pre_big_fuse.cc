#include "ehc/mhc/pre_big_fuse.h"

#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/registry.h"
#include "core/workspace.h"
#include "ops/mhc/pre_apply/pre_apply_args.h"
#include "ops/mhc/pre_big_fuse/pre_big_fuse_args.h"
#include "ops/mhc/reduce_partials/reduce_partials_args.h"
#include "ops/mhc/shared/group_call.h"
#include "ops/mhc/shared/mix_group.h"
#include "ops/mhc/shared/sinkhorn_call.h"
#include "ops/mhc/shared/stream_call.h"
#include "ops/mhc/sinkhorn/sinkhorn_args.h"
#include "ops/mhc/split/split_args.h"

namespace ehc::mhc {

void pre_big_fuse_cuda(const BigFuseArgs& args, int device, void* stream);

namespace {

using P = PreBigFuse;

constexpr auto kTable = table(
    "mhc.pre_big_fuse", "2.9", "coefficients and layer input from the sums of a projection",
    in<&P::mul_partial>("mul_partial", "F32[S,T,G?,N]"),
    in<&P::sqr_partial>("sqr_partial", "F32[S,T,G?]"), in<&P::scale>("scale", "F32[3]"),
    in<&P::base>("base", "F32[N]"), in<&P::residual>("residual", "A[T,n,d]"),
    in<&P::layer_norm_weight>("layer_norm_weight", "W[d]").optional(), mix_group<P>(),
    attribute<&P::layer_norm_eps>("layer_norm_eps").positive().required_with("layer_norm_weight"),
    out<&P::layer_input>("layer_input", "A[T,d]"), out<&P::post>("post", "F32[T,n]"),
    out<&P::comb>("comb", "F32[T,n,n]"),
    // Sums over splits, split, Sinkhorn, collapse, norm of the collapsed row.
    flops("T*G*(S*(N+1)+N)"), flops("4*T*N"), flops(kSinkhornFlops), flops("2*T*n*d"),
    flops("4*T*d", "layer_norm_weight"));

void check_sizes(const Schema& schema, const Bound& bound, const void* params) {
  const P& p = *static_cast<const P*>(params);
  const int64_t n = bound["n"];
  const int64_t columns = n * bound["d"];
  if (bound["N"] != n * n + 2 * n) {
    fail_tensor(schema, "mul_partial",
                "N = n*n + 2*n = " + std::to_string(n * n + 2 * n) + " columns",
                describe(p.mul_partial));
  }
  if (columns % bound["G"] != 0) {
    fail_tensor(schema, "mul_partial", "G that divides n*d = " + std::to_string(columns),
                describe(p.mul_partial));
  }
}

// Tokens whose coefficients are made together, step by step in arrays of a piece's own.
constexpr int64_t kBlock = 64;

Pieces cut_blocks(const Call& call) {
  return Pieces(call.context, (call.bound["T"] + kBlock - 1) / kBlock, 1);
}
Pieces cut_tokens(const Call& call) {
  const StreamSizes sizes = stream_sizes(call.bound);
  return Pieces(call.context, sizes.tokens, tokens_of_grain(sizes));
}

struct Scratch {
  float* pre = nullptr;     // [T,n]
  float* mixes = nullptr;   // [kBlock,N] for every piece
  float* logits = nullptr;  // [kBlock,n,n] for every piece
  char* row = nullptr;      // A[d] for every piece of tokens, before the norm
  int64_t row_bytes = 0;

  Scratch() = default;
  Scratch(Workspace& workspace, const Call& call) {
    const StreamSizes sizes = stream_sizes(call.bound);
    const int64_t n = sizes.streams;
    const int64_t pieces = cut_blocks(call).count;
    pre = workspace.take<float>(sizes.tokens * n);
    mixes = workspace.take<float>(pieces * kBlock * call.bound["N"]);
    logits = workspace.take<float>(pieces * kBlock * n * n);
    row_bytes = sizes.hidden * static_cast<int64_t>(size_of(sizes.activation));
    row = workspace.take<char>(cut_tokens(call).count * row_bytes);
  }
};

size_t workspace(const Call& call) {
  Workspace arrays(nullptr);
  Scratch(arrays, call);
  return call.bound["T"] == 0 ? 0 : arrays.bytes();
}

// Rows from token `first` on.
Coefficients from_token(Coefficients rows, int64_t first) {
  if (rows.data != nullptr) rows.data += first * rows.token_stride;
  return rows;
}
GroupRows from_token(GroupRows rows, int64_t first) {
  if (rows.data != nullptr) rows.data += first * rows.token_stride;
  return rows;
}

// The steps of a block, each with arguments for its tokens 0 .. count.
struct BlockArgs {
  ReducePartialsForwardArgs reduce;
  SplitForwardArgs split;
  SinkhornForwardArgs sinkhorn;

  BlockArgs(const P& p, const Bound& b, int64_t first, const Scratch& s, int64_t piece) {
    const int64_t n = b["n"];
    const int64_t mixes = b["N"];
    const Coefficients mixed = {s.mixes + piece * kBlock * mixes, mixes, 0};
    const Coefficients logits = {s.logits + piece * kBlock * n * n, n * n, n};
    reduce = {.splits = b["S"],
              .groups = b["G"],
              .mixes = mixes,
              .rms = rms_of(p, n * b["d"] / b["G"]),
              .mul_partial = from_token(partial_rows(p.mul_partial, 4), first),
              .sqr_partial = from_token(partial_rows(p.sqr_partial, 3), first),
              .mixed = {mixed.data, 0, mixed.token_stride, 0},
              .mul = {},
              .sqr = {}};
    split = {.streams = n,
             .mixes = mixed,
             .scale = p.scale.as<float>(),
             .base = p.base.as<float>(),
             .pre_eps = static_cast<float>(*p.pre_eps),
             .post_mult = static_cast<float>(*p.post_mult),
             .pre = from_token(Coefficients{s.pre, n, 0}, first),
             .post = from_token(coefficients(p.post), first),
             .comb_logits = logits};
    sinkhorn = {sinkhorn_rule(n, *p.repeat, *p.sinkhorn_eps, p.convention), logits,
                from_token(coefficients(p.comb), first)};
  }
};

// The last step but for pre, and what follows it.
PreApplyForwardArgs collapse_args(const P& p, const StreamSizes& sizes) {
  return {.sizes = sizes,
          .residual = stream_rows(p.residual),
          .pre = {},
          .layer_input = stream_rows(p.layer_input),
          .streaming = exceeds_cache(sizes, sizes.streams + 1)};
}

LayerNormArgs norm_args(const P& p, const StreamSizes& sizes) {
  return {.sizes = sizes,
          .rows = {},
          .out = stream_rows(p.layer_input),
          .weight_type = p.layer_norm_weight.dtype,
          .weight = p.layer_norm_weight.data,
          .eps = static_cast<float>(p.layer_norm_eps.value_or(0)),
          .streaming = exceeds_cache(sizes, sizes.streams + 1)};
}

template <auto Reduce, auto Split, auto Sinkhorn, auto Collapse, auto Normalise>
void run(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  const StreamSizes sizes = stream_sizes(call.bound);
  const Pieces blocks = cut_blocks(call);
  Workspace arrays(call.context.workspace());
  const Scratch scratch(arrays, call);
  blocks.run(call.context, [&](int64_t piece, int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock;
      const int64_t count = std::min(kBlock, sizes.tokens - first);
      const BlockArgs args(p, call.bound, first, scratch, piece);
      Reduce(args.reduce, 0, count);
      Split(args.split, 0, count);
      Sinkhorn(args.sinkhorn, 0, count);
    }
  });

  PreApplyForwardArgs collapse = collapse_args(p, sizes);
  collapse.pre = {scratch.pre, sizes.streams, 0};
  if (!p.layer_norm_weight) {
    for_each_tile(call.context, sizes, [&](const Tile& tile) { Collapse(collapse, tile); });
    return;
  }
  const LayerNormArgs norm = norm_args(p, sizes);
  collapse.streaming = false;
  cut_tokens(call).run(call.context, [&](int64_t piece, int64_t begin, int64_t end) {
    PreApplyForwardArgs to_row = collapse;
    LayerNormArgs from_row = norm;
    // The same row for every token: with strides of 0.
    to_row.layer_input = from_row.rows = {scratch.row + piece * scratch.row_bytes, 0, 0};
    for (int64_t t = begin; t < end; ++t) {
      Collapse(to_row, Tile{t, t + 1, 0, sizes.hidden});
      Normalise(from_row, t, t + 1);
    }
  });
}

#if EHC_HAS_CUDA
BigFuseArgs fused_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  const StreamSizes sizes = stream_sizes(call.bound);
  const Scratch no_scratch;
  const BlockArgs steps(p, call.bound, 0, no_scratch, 0);
  return {steps.reduce,
          steps.split,
          steps.sinkhorn.rule,
          steps.sinkhorn.comb,
          collapse_args(p, sizes),
          norm_args(p, sizes)};
}
#endif

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_on_device<&fused_args, &pre_big_fuse_cuda>, nullptr},
#endif
#define EHC_LIST(isa)                                                                        \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>,                                  \
   &run<&isa::reduce_partials_fwd_tokens, &isa::split_fwd_tokens, &isa::sinkhorn_fwd_tokens, \
        &isa::pre_apply_fwd_tile, &isa::layer_norm_rows>,                                    \
   &workspace},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr,
         &run<&reduce_partials_fwd_reference<double>, &split_fwd_reference<double>,
              &sinkhorn_fwd_reference<double>, &pre_apply_fwd_reference<double>,
              &layer_norm_reference<double>>,
         &workspace},
    {"reference.f32", Device::cpu, nullptr,
     &run<&reduce_partials_fwd_reference<float>, &split_fwd_reference<float>,
          &sinkhorn_fwd_reference<float>, &pre_apply_fwd_reference<float>,
          &layer_norm_reference<float>>,
     &workspace},
};

constexpr Operator kPreBigFuse = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.rules = &check_sizes;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(pre_big_fuse, PreBigFuse, kPreBigFuse);
EHC_REGISTER(pre_big_fuse, &kPreBigFuse);

}  // namespace ehc::mhc
