#include "ehc/engram/conv_bwd.h"

#include "backends/cpu/cache.h"
#include "backends/cpu/isa.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "core/workspace.h"
#include "ops/engram/conv/conv_math.h"
#include "ops/engram/conv_bwd/conv_bwd_args.h"
#include "ops/engram/shared/conv_bwd_call.h"
#include "ops/engram/shared/conv_grad_arrays.h"
#include "ops/engram/shared/sequences.h"

namespace ehc::engram {

template <class Real>
void conv_reference_norms(const ConvForwardArgs& args, Real* norms, int64_t begin, int64_t end);
template <class Real>
void conv_bwd_reference_conv(const ConvBackwardArgs& args, const Real* norms, Real* grad_conv,
                             int64_t begin, int64_t end);
template <class Real>
void conv_bwd_reference_rows(const ConvBackwardArgs& args, const Real* norms, const Real* grad_conv,
                             Real* grad_input, int64_t begin, int64_t end);
template <class Real>
void conv_bwd_reference_sums(const ConvBackwardArgs& args, const Real* norms, const Real* grad_conv,
                             const Real* grad_input, int64_t begin, int64_t end);
void conv_bwd_cuda(const ConvBackwardArgs& args, const ConvGradArrays& arrays, int device,
                   void* stream);

namespace {

using P = ConvBackward;

constexpr auto kTable = table(
    "engram.conv_bwd", "1.13", "gradients of the short causal convolution",
    in<&P::grad_out>("grad_out", "A[T,n,d]"), in<&P::gated_value>("gated_value", "A[T,n,d]"),
    in<&P::conv_weight>("conv_weight", "W[n,d,w]"),
    in<&P::conv_norm_weight>("conv_norm_weight", "W[n,d]"),
    in<&P::cu_seqlens>("cu_seqlens", "I32[B+1]").optional().packed(),
    in<&P::image_token_mask>("image_token_mask", "BOOL[T]").optional().packed(),
    in<&P::grad_conv_weight_acc>("grad_conv_weight_acc", "F32[n,d,w]").optional(),
    in<&P::grad_conv_norm_weight_acc>("grad_conv_norm_weight_acc", "F32[n,d]").optional(),
    attribute<&P::dilation>("dilation").at_least(1), attribute<&P::conv_eps>("conv_eps").positive(),
    out<&P::grad_gated_value>("grad_gated_value", "A[T,n,d]"),
    out<&P::grad_conv_weight>("grad_conv_weight", "F32[n,d,w]").may_alias("grad_conv_weight_acc"),
    out<&P::grad_conv_norm_weight>("grad_conv_norm_weight", "F32[n,d]")
        .may_alias("grad_conv_norm_weight_acc"),
    default_symbol("B", 1, "cu_seqlens"), flops("T*n*d*(6*w+23)"));

void check_borders(const Schema& schema, const Bound& bound, const void* params) {
  check_sequences(schema, static_cast<const P*>(params)->cu_seqlens, bound["T"]);
}

ConvBackwardArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  ConvBackwardArgs a;
  ConvForwardArgs& f = a.forward;
  f.tokens = call.bound["T"];
  f.streams = call.bound["n"];
  f.hidden = call.bound["d"];
  f.activation = p.gated_value.dtype;
  f.gated_value = p.gated_value.data;
  f.value_token_stride = p.gated_value.stride[0];
  f.value_stream_stride = p.gated_value.stride[1];
  f.image_token_mask = p.image_token_mask.as<uint8_t>();
  f.conv = short_conv(p, call.bound);
  a.grad_out = p.grad_out.data;
  a.grad_token_stride = p.grad_out.stride[0];
  a.grad_stream_stride = p.grad_out.stride[1];
  a.grad_value = p.grad_gated_value.data;
  a.grad_value_token_stride = p.grad_gated_value.stride[0];
  a.grad_value_stream_stride = p.grad_gated_value.stride[1];
  a.sums = conv_sums(p, call.bound, f.activation);
  const auto row_bytes = static_cast<size_t>(f.hidden) * size_of(f.activation);
  f.streaming =
      static_cast<size_t>(3 * f.tokens * f.streams) * row_bytes > last_level_cache_bytes();
  return a;
}

// Arrays of one call of the SIMD kernels; every piece of the items has scratch of its own.
struct Scratch {
  float* prepared;
  float* partials;
  float* pieces;
  int64_t floats_of_piece;
};

Pieces cut_items(const Call& call, const ConvBackwardArgs& a) {
  return {call.context, a.sums.partials.chunks * a.forward.streams, 1};
}

Scratch take_scratch(Workspace& workspace, const ConvBackwardArgs& a, const Pieces& pieces) {
  const ConvForwardArgs& f = a.forward;
  const ShortConv& conv = f.conv;
  Scratch s;
  s.prepared = workspace.take<float>(conv_bwd_prepared_floats(conv.taps, f.streams, f.hidden));
  s.partials = workspace.take<float>(a.sums.partials.floats());
  s.floats_of_piece =
      whole_lines(conv_bwd_scratch_floats(f.tokens, conv_history(conv.taps, conv.dilation),
                                          f.hidden, static_cast<int64_t>(size_of(f.activation))));
  s.pieces = workspace.take<float>(s.floats_of_piece * pieces.count);
  return s;
}

size_t cpu_workspace(const Call& call) {
  const ConvBackwardArgs args = make_args(call);
  Workspace workspace(nullptr);
  take_scratch(workspace, args, cut_items(call, args));
  return workspace.bytes();
}

template <auto Prepare, auto Items, auto Sums>
void run_cpu(const Call& call) {
  ConvBackwardArgs args = make_args(call);
  const Pieces pieces = cut_items(call, args);
  Workspace workspace(call.context.workspace());
  const Scratch scratch = take_scratch(workspace, args, pieces);
  args.forward.conv.prepared = scratch.prepared;
  args.sums.prepared = scratch.prepared;
  args.sums.partials.data = scratch.partials;
  const int64_t streams = args.forward.streams;
  parallel_for(call.context, streams, 1,
               [&](int64_t begin, int64_t end) { Prepare(args.forward, begin, end); });
  pieces.run(call.context, [&](int64_t piece, int64_t begin, int64_t end) {
    Items(args, begin, end, scratch.pieces + piece * scratch.floats_of_piece);
  });
  parallel_for(call.context, streams * conv_sum_blocks(args.forward.hidden), 8,
               [&](int64_t begin, int64_t end) { Sums(args.sums, begin, end); });
}

template <class Real>
struct ReferenceScratch {
  Real *norms, *grad_conv, *grad_input;

  ReferenceScratch(Workspace& workspace, const Bound& bound) {
    const int64_t rows = bound["T"] * bound["n"];
    norms = workspace.take<Real>(rows);
    grad_conv = workspace.take<Real>(rows * bound["d"]);
    grad_input = workspace.take<Real>(rows * bound["d"]);
  }
};

template <class Real>
size_t reference_workspace(const Call& call) {
  Workspace workspace(nullptr);
  ReferenceScratch<Real>(workspace, call.bound);
  return workspace.bytes();
}

template <class Real>
void run_reference(const Call& call) {
  const ConvBackwardArgs args = make_args(call);
  Workspace workspace(call.context.workspace());
  const ReferenceScratch<Real> s(workspace, call.bound);
  const auto for_tokens = [&](const auto& body) {
    parallel_for(call.context, args.forward.tokens, 1, body);
  };
  for_tokens(
      [&](int64_t begin, int64_t end) { conv_reference_norms(args.forward, s.norms, begin, end); });
  for_tokens([&](int64_t begin, int64_t end) {
    conv_bwd_reference_conv<Real>(args, s.norms, s.grad_conv, begin, end);
  });
  for_tokens([&](int64_t begin, int64_t end) {
    conv_bwd_reference_rows<Real>(args, s.norms, s.grad_conv, s.grad_input, begin, end);
  });
  parallel_for(call.context, args.forward.streams, 1, [&](int64_t begin, int64_t end) {
    conv_bwd_reference_sums<Real>(args, s.norms, s.grad_conv, s.grad_input, begin, end);
  });
}

#if EHC_HAS_CUDA
ConvGradArrays take_device_arrays(Workspace& workspace, const ConvBackwardArgs& a) {
  return take_conv_grad_arrays(workspace, a.forward.tokens, a.forward.streams, a.forward.hidden,
                               a.sums.partials);
}

size_t cuda_workspace(const Call& call) {
  const ConvBackwardArgs args = make_args(call);
  Workspace workspace(nullptr);
  take_device_arrays(workspace, args);
  return workspace.bytes();
}

void run_cuda(const Call& call) {
  ConvBackwardArgs args = make_args(call);
  Workspace workspace(call.context.workspace());
  const ConvGradArrays arrays = take_device_arrays(workspace, args);
  args.sums.partials.data = arrays.partials;
  conv_bwd_cuda(args, arrays, call.context.device_index(), call.context.stream());
}
#endif

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_cuda, &cuda_workspace},
#endif
#define EHC_LIST(isa)                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, \
   &run_cpu<&isa::conv_bwd_prepare, &isa::conv_bwd_items, &isa::conv_bwd_sums>, &cpu_workspace},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_reference<double>, &reference_workspace<double>},
    {"reference.f32", Device::cpu, nullptr, &run_reference<float>, &reference_workspace<float>},
};

constexpr Operator kConvBackward = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.rules = &check_borders;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(conv_bwd, ConvBackward, kConvBackward);
EHC_REGISTER(conv_bwd, &kConvBackward);

}  // namespace ehc::engram
