#include "ehc/engram/conv.h"

#include "backends/cpu/cache.h"
#include "backends/cpu/isa.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "core/workspace.h"
#include "ops/engram/conv/conv_args.h"
#include "ops/engram/conv/conv_math.h"
#include "ops/engram/shared/conv_call.h"
#include "ops/engram/shared/sequences.h"

namespace ehc::engram {

template <class Real>
void conv_reference_norms(const ConvForwardArgs& args, Real* norms, int64_t begin, int64_t end);
template <class Real>
void conv_reference_rows(const ConvForwardArgs& args, const Real* norms, int64_t begin,
                         int64_t end);
template <class Real>
void conv_reference_state(const ConvForwardArgs& args, const Real* norms, int64_t begin,
                          int64_t end);
void conv_fwd_cuda(const ConvForwardArgs& args, float* norms, int device, void* stream);

namespace {

using P = ConvForward;

constexpr auto kTable = table(
    "engram.conv_fwd", "1.13", "short causal convolution of the gated values",
    in<&P::gated_value>("gated_value", "A[T,n,d]"), in<&P::conv_weight>("conv_weight", "W[n,d,w]"),
    in<&P::conv_norm_weight>("conv_norm_weight", "W[n,d]"),
    in<&P::cu_seqlens>("cu_seqlens", "I32[B+1]").optional().packed(),
    in<&P::image_token_mask>("image_token_mask", "BOOL[T]").optional().packed(),
    in<&P::state>("state", "F32[B,(w-1)*dilation,n,d]").optional(),
    attribute<&P::dilation>("dilation").at_least(1).fixes("dilation"),
    attribute<&P::conv_eps>("conv_eps").positive(), out<&P::out>("out", "A[T,n,d]"),
    out<&P::new_state>("state", "F32[B,(w-1)*dilation,n,d]", "state").may_alias("state"),
    default_symbol("B", 1, "cu_seqlens"), flops("T*n*d*(2*w+10)"));

void check_borders(const Schema& schema, const Bound& bound, const void* params) {
  check_sequences(schema, static_cast<const P*>(params)->cu_seqlens, bound["T"]);
}

ConvForwardArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  ConvForwardArgs a;
  a.tokens = call.bound["T"];
  a.streams = call.bound["n"];
  a.hidden = call.bound["d"];
  a.activation = p.gated_value.dtype;
  a.gated_value = p.gated_value.data;
  a.value_token_stride = p.gated_value.stride[0];
  a.value_stream_stride = p.gated_value.stride[1];
  a.image_token_mask = p.image_token_mask.as<uint8_t>();
  a.out = p.out.data;
  a.out_token_stride = p.out.stride[0];
  a.out_stream_stride = p.out.stride[1];
  a.conv = short_conv(p, call.bound);
  const auto row_bytes = static_cast<size_t>(a.hidden) * size_of(a.activation);
  a.streaming =
      static_cast<size_t>(2 * a.tokens * a.streams) * row_bytes > last_level_cache_bytes();
  return a;
}

// Arrays of one call of the SIMD kernels; every piece of the tokens has norms of its own.
struct Scratch {
  float* prepared;
  float* norms;
  int64_t norms_of_piece;
};

Scratch take_scratch(Workspace& workspace, const ConvForwardArgs& a, const Pieces& pieces) {
  const int64_t history = conv_history(a.conv.taps, a.conv.dilation);
  Scratch s;
  s.norms_of_piece = conv_scratch_floats(a.streams, history, a.tokens, a.tokens + pieces.longest());
  s.prepared = workspace.take<float>(conv_prepared_floats(a.conv.taps, a.streams, a.hidden));
  s.norms = workspace.take<float>(s.norms_of_piece * pieces.count);
  return s;
}

size_t cpu_workspace(const Call& call) {
  const ConvForwardArgs args = make_args(call);
  Workspace workspace(nullptr);
  take_scratch(workspace, args, cut_tokens(call));
  return workspace.bytes();
}

template <auto Prepare, auto Rows, auto State>
void run_cpu(const Call& call) {
  ConvForwardArgs args = make_args(call);
  const Pieces pieces = cut_tokens(call);
  Workspace workspace(call.context.workspace());
  const Scratch scratch = take_scratch(workspace, args, pieces);
  args.conv.prepared = scratch.prepared;
  parallel_for(call.context, args.streams, 1,
               [&](int64_t begin, int64_t end) { Prepare(args, begin, end); });
  pieces.run(call.context, [&](int64_t piece, int64_t begin, int64_t end) {
    Rows(args, begin, end, scratch.norms + piece * scratch.norms_of_piece);
  });
  if (args.conv.next_state.data == nullptr) return;
  parallel_for(call.context, args.conv.sequences, 1,
               [&](int64_t begin, int64_t end) { State(args, begin, end); });
}

template <class Real>
size_t reference_workspace(const Call& call) {
  Workspace workspace(nullptr);
  workspace.take<Real>(call.bound["T"] * call.bound["n"]);
  return workspace.bytes();
}

template <class Real>
void run_reference(const Call& call) {
  const ConvForwardArgs args = make_args(call);
  Real* norms = Workspace(call.context.workspace()).take<Real>(args.tokens * args.streams);
  parallel_for(call.context, args.tokens, 1,
               [&](int64_t begin, int64_t end) { conv_reference_norms(args, norms, begin, end); });
  parallel_for(call.context, args.tokens, 1, [&](int64_t begin, int64_t end) {
    conv_reference_rows<Real>(args, norms, begin, end);
  });
  if (args.conv.next_state.data == nullptr) return;
  parallel_for(call.context, args.conv.sequences, 1, [&](int64_t begin, int64_t end) {
    conv_reference_state<Real>(args, norms, begin, end);
  });
}

#if EHC_HAS_CUDA
size_t cuda_workspace(const Call& call) {
  Workspace workspace(nullptr);
  workspace.take<float>(call.bound["T"] * call.bound["n"]);
  return workspace.bytes();
}

void run_cuda(const Call& call) {
  const ConvForwardArgs args = make_args(call);
  float* norms = Workspace(call.context.workspace()).take<float>(args.tokens * args.streams);
  conv_fwd_cuda(args, norms, call.context.device_index(), call.context.stream());
}
#endif

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_cuda, &cuda_workspace},
#endif
#define EHC_LIST(isa)                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, \
   &run_cpu<&isa::conv_prepare, &isa::conv_fwd_rows, &isa::conv_state_rows>, &cpu_workspace},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_reference<double>, &reference_workspace<double>},
    {"reference.f32", Device::cpu, nullptr, &run_reference<float>, &reference_workspace<float>},
};

constexpr Operator kConvForward = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.rules = &check_borders;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(conv_fwd, ConvForward, kConvForward);
EHC_REGISTER(conv, &kConvForward);

}  // namespace ehc::engram
