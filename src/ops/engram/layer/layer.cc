#include "ehc/engram/layer.h"

#include <algorithm>
#include <string_view>

#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "core/workspace.h"
#include "ehc/engram/fused_weight.h"
#include "ops/engram/conv/conv_math.h"
#include "ops/engram/layer/layer_args.h"
#include "ops/engram/shared/conv_call.h"
#include "ops/engram/shared/gate_call.h"
#include "ops/engram/shared/gate_reference.h"
#include "ops/engram/shared/sequences.h"

namespace ehc::engram {

template <class Real>
void layer_reference_gates(const LayerForwardArgs& args, Real* alpha, Real* beta, int64_t begin,
                           int64_t end);
template <class Real>
void layer_reference_rows(const LayerForwardArgs& args, const Real* alpha, const Real* beta,
                          int64_t begin, int64_t end);
template <class Real>
void layer_reference_state(const LayerForwardArgs& args, const Real* beta, int64_t begin,
                           int64_t end);
void gate_fwd_cuda(const GateForwardArgs& args, int device, void* stream);
void layer_fwd_cuda(const LayerForwardArgs& args, int device, void* stream);
std::string_view layer_fwd_sm90_refusal(const LayerForwardArgs& args, int device);
void layer_fwd_sm90(const LayerForwardArgs& args, int device, void* stream);

namespace {

using P = LayerForward;

constexpr auto kTable = table(
    "engram.layer_fwd", "1.14", "whole Engram layer: gate, short convolution, residual sum",
    in<&P::residual>("residual", "A[T,n,d]"), kv_group<P>(),
    in<&P::weight_hidden>("weight_hidden", "W[n,d]"),
    in<&P::weight_embed>("weight_embed", "W[n,d]"),
    in<&P::conv_weight>("conv_weight", "W[n,d,w]").optional(),
    in<&P::conv_norm_weight>("conv_norm_weight", "W[n,d]").optional(),
    in<&P::cu_seqlens>("cu_seqlens", "I32[B+1]").optional().packed(),
    in<&P::image_token_mask>("image_token_mask", "BOOL[T]").optional().packed(),
    in<&P::state>("state", "F32[B,(w-1)*dilation,n,d]").optional(),
    all_or_none("conv_weight conv_norm_weight"), attribute<&P::eps>("eps").positive(),
    attribute<&P::clamp>("clamp").positive(),
    attribute<&P::dilation>("dilation").at_least(1).required_with("conv_weight").fixes("dilation"),
    attribute<&P::conv_eps>("conv_eps").positive().required_with("conv_weight"),
    attribute<&P::rounding>("rounding", "once/twice"), call_flag("save"),
    out<&P::out>("out", "A[T,n,d]"), out<&P::dot>("dot", "F32[T,n]", "save"),
    out<&P::alpha>("alpha", "F32[T,n]", "save"),
    out<&P::rstd_residual>("rstd_residual", "F32[T,n]", "save"),
    out<&P::rstd_key>("rstd_key", "F32[T,n]", "save"),
    out<&P::new_state>("state", "F32[B,(w-1)*dilation,n,d]", "state").may_alias("state"),
    all_or_none("dot alpha rstd_residual rstd_key"), default_symbol("B", 1, "cu_seqlens"),
    flops("9*T*n*d"), flops("T*n*d*(2*w+10)", "conv_weight"));

void check_sequence_arguments(const Schema& schema, const Bound& bound, const void* params) {
  const P& p = *static_cast<const P*>(params);
  if (p.state && !p.conv_weight) {
    fail_tensor(schema, "state", "none without 'conv_weight'", describe(p.state));
  }
  check_sequences(schema, p.cu_seqlens, bound["T"]);
}

const P& params_of(const Call& call) { return *static_cast<const P*>(call.params); }

StreamWeight stream_weight(const Tensor& t) { return {t.dtype, t.data, t.stride[0]}; }

// Without the arrays of the workspace.
LayerForwardArgs make_args(const Call& call) {
  const P& p = params_of(call);
  LayerForwardArgs a;
  a.gate = gate_call_args(p, call.bound);
  a.gate.weight_stream_stride = a.gate.hidden;
  if (p.conv_weight) a.conv = short_conv(p, call.bound);
  a.hidden_weight = stream_weight(p.weight_hidden);
  a.embed_weight = stream_weight(p.weight_embed);
  a.round_twice = p.rounding == P::Rounding::twice;
  return a;
}

// By the operator itself, on the implementation of the same name.
void fuse_weights(const Call& call, float* fused) {
  const P& p = params_of(call);
  fused_weight(call.context, {.weight_hidden = p.weight_hidden,
                              .weight_embed = p.weight_embed,
                              .weight_fused = {fused,
                                               DType::f32,
                                               {call.bound["n"], call.bound["d"]},
                                               p.residual.device,
                                               p.residual.device_index}});
}

template <auto Gate>
void run_gate_alone(const Call& call, const GateForwardArgs& gate) {
  const int64_t grain = std::max<int64_t>(1, 16384 / (gate.streams * gate.hidden));
  parallel_for(call.context, gate.tokens, grain,
               [&](int64_t begin, int64_t end) { Gate(gate, begin, end); });
}

// Arrays of one call of the SIMD kernels; every piece of the tokens has scalars of its own.
struct Scratch {
  float* fused;
  float* prepared = nullptr;
  float* scalars = nullptr;
  int64_t scalars_of_piece = 0;
};

Scratch take_scratch(Workspace& workspace, const LayerForwardArgs& a, const Pieces& pieces) {
  const GateForwardArgs& gate = a.gate;
  Scratch s{.fused = workspace.take<float>(gate.streams * gate.hidden)};
  if (a.conv.conv_weight == nullptr) return s;
  const int64_t history = conv_history(a.conv.taps, a.conv.dilation);
  s.scalars_of_piece =
      layer_scratch_floats(gate.streams, history, gate.tokens, gate.tokens + pieces.longest());
  s.prepared = workspace.take<float>(conv_prepared_floats(a.conv.taps, gate.streams, gate.hidden));
  s.scalars = workspace.take<float>(s.scalars_of_piece * pieces.count);
  return s;
}

size_t cpu_workspace(const Call& call) {
  Workspace workspace(nullptr);
  take_scratch(workspace, make_args(call), cut_tokens(call));
  return workspace.bytes();
}

template <auto Gate, auto Prepare, auto Rows, auto State>
void run_cpu(const Call& call) {
  LayerForwardArgs args = make_args(call);
  const Pieces pieces = cut_tokens(call);
  Workspace workspace(call.context.workspace());
  const Scratch scratch = take_scratch(workspace, args, pieces);
  fuse_weights(call, scratch.fused);
  args.gate.weight_fused = scratch.fused;
  if (args.conv.conv_weight == nullptr) return run_gate_alone<Gate>(call, args.gate);

  args.conv.prepared = scratch.prepared;
  parallel_for(call.context, args.gate.streams, 1,
               [&](int64_t begin, int64_t end) { Prepare(args, begin, end); });
  pieces.run(call.context, [&](int64_t piece, int64_t begin, int64_t end) {
    Rows(args, begin, end, scratch.scalars + piece * scratch.scalars_of_piece);
  });
  if (args.conv.next_state.data == nullptr) return;
  parallel_for(call.context, args.conv.sequences, 1,
               [&](int64_t begin, int64_t end) { State(args, begin, end); });
}

template <class Real>
struct ReferenceScratch {
  float* fused;
  Real* alpha;
  Real* beta;

  ReferenceScratch(Workspace& workspace, const Bound& bound)
      : fused(workspace.take<float>(bound["n"] * bound["d"])),
        alpha(workspace.take<Real>(bound["T"] * bound["n"])),
        beta(workspace.take<Real>(bound["T"] * bound["n"])) {}
};

template <class Real>
size_t reference_workspace(const Call& call) {
  Workspace workspace(nullptr);
  ReferenceScratch<Real>(workspace, call.bound);
  return workspace.bytes();
}

template <class Real, auto Gate>
void run_reference(const Call& call) {
  LayerForwardArgs args = make_args(call);
  Workspace workspace(call.context.workspace());
  const ReferenceScratch<Real> scratch(workspace, call.bound);
  fuse_weights(call, scratch.fused);
  args.gate.weight_fused = scratch.fused;
  if (args.conv.conv_weight == nullptr) return run_gate_alone<Gate>(call, args.gate);

  parallel_for(call.context, args.gate.tokens, 1, [&](int64_t begin, int64_t end) {
    layer_reference_gates(args, scratch.alpha, scratch.beta, begin, end);
  });
  parallel_for(call.context, args.gate.tokens, 1, [&](int64_t begin, int64_t end) {
    layer_reference_rows<Real>(args, scratch.alpha, scratch.beta, begin, end);
  });
  if (args.conv.next_state.data == nullptr) return;
  parallel_for(call.context, args.conv.sequences, 1, [&](int64_t begin, int64_t end) {
    layer_reference_state<Real>(args, scratch.beta, begin, end);
  });
}

#if EHC_HAS_CUDA
// Gives `args` its arrays in the workspace.
void take_device_arrays(Workspace& workspace, LayerForwardArgs& args) {
  GateForwardArgs& gate = args.gate;
  gate.weight_fused = workspace.take<float>(gate.streams * gate.hidden);
  if (args.conv.conv_weight == nullptr) return;
  gate.value_mean_square = workspace.take<float>(gate.tokens);
  if (gate.alpha.data == nullptr) {
    gate.alpha = {workspace.take<float>(gate.tokens * gate.streams), gate.streams};
  }
}

size_t cuda_workspace(const Call& call) {
  LayerForwardArgs args = make_args(call);
  Workspace workspace(nullptr);
  take_device_arrays(workspace, args);
  return workspace.bytes();
}

void run_cuda(const Call& call) {
  LayerForwardArgs args = make_args(call);
  Workspace workspace(call.context.workspace());
  take_device_arrays(workspace, args);
  if (args.gate.tokens > 0) fuse_weights(call, const_cast<float*>(args.gate.weight_fused));
  const int device = call.context.device_index();
  void* stream = call.context.stream();
  if (args.conv.conv_weight == nullptr) return gate_fwd_cuda(args.gate, device, stream);
  layer_fwd_cuda(args, device, stream);
}

// Its kernel needs no workspace. But whether it runs depends on alignment, which the answer about
// the workspace must not.
std::string_view refuse_sm90(const Call& call) {
  return layer_fwd_sm90_refusal(make_args(call), call.context.device_index());
}
#endif

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda.sm90", Device::cuda, &refuse_sm90, &run_on_device<&make_args, &layer_fwd_sm90>,
     &cuda_workspace},
    {"cuda", Device::cuda, nullptr, &run_cuda, &cuda_workspace},
#endif
#define EHC_LIST(isa)                                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>,                 \
   &run_cpu<&isa::gate_fwd_rows, &isa::layer_prepare, &isa::layer_fwd_rows, \
            &isa::layer_state_rows>,                                        \
   &cpu_workspace},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_reference<double, &gate_fwd_reference>,
         &reference_workspace<double>},
    {"reference.f32", Device::cpu, nullptr, &run_reference<float, &gate_fwd_reference_f32>,
     &reference_workspace<float>},
};

constexpr Operator kLayerForward = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.rules = &check_sequence_arguments;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(layer_fwd, LayerForward, kLayerForward);
EHC_REGISTER(layer, &kLayerForward);

}  // namespace ehc::engram
