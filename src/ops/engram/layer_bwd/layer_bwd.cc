#include "ehc/engram/layer_bwd.h"

#include "backends/cpu/isa.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "core/token_chunks.h"
#include "core/workspace.h"
#include "ehc/engram/fused_weight.h"
#include "ehc/engram/gate_bwd.h"
#include "ehc/engram/grad_w_reduce.h"
#include "ops/engram/conv/conv_math.h"
#include "ops/engram/layer_bwd/layer_bwd_args.h"
#include "ops/engram/shared/conv_bwd_call.h"
#include "ops/engram/shared/gate_bwd_call.h"
#include "ops/engram/shared/gate_bwd_reference.h"
#include "ops/engram/shared/gate_statistics.h"
#include "ops/engram/shared/layer_bwd_reference.h"
#include "ops/engram/shared/layer_grad_arrays.h"
#include "ops/engram/shared/sequences.h"

namespace ehc::engram {

void gate_bwd_cuda(const GateBackwardArgs& args, const GradWeightPartials& partials, int device,
                   void* stream);
void layer_bwd_cuda(const LayerBackwardArgs& args, const LayerGradArrays& arrays, int device,
                    void* stream);

namespace {

using P = LayerBackward;

constexpr auto kTable = table(
    "engram.layer_bwd", "1.14", "gradients of the whole Engram layer",
    in<&P::grad_out>("grad_out", "A[T,n,d]"), in<&P::residual>("residual", "A[T,n,d]"),
    kv_group<P>(), in<&P::weight_hidden>("weight_hidden", "W[n,d]"),
    in<&P::weight_embed>("weight_embed", "W[n,d]"),
    in<&P::conv_weight>("conv_weight", "W[n,d,w]").optional(),
    in<&P::conv_norm_weight>("conv_norm_weight", "W[n,d]").optional(),
    in<&P::cu_seqlens>("cu_seqlens", "I32[B+1]").optional().packed(),
    in<&P::image_token_mask>("image_token_mask", "BOOL[T]").optional().packed(),
    in<&P::grad_weight_hidden_acc>("grad_weight_hidden_acc", "F32[n,d]").optional(),
    in<&P::grad_weight_embed_acc>("grad_weight_embed_acc", "F32[n,d]").optional(),
    in<&P::grad_conv_weight_acc>("grad_conv_weight_acc", "F32[n,d,w]").optional(),
    in<&P::grad_conv_norm_weight_acc>("grad_conv_norm_weight_acc", "F32[n,d]").optional(),
    all_or_none("conv_weight conv_norm_weight"), attribute<&P::eps>("eps").positive(),
    attribute<&P::clamp>("clamp").positive(),
    attribute<&P::dilation>("dilation").at_least(1).required_with("conv_weight"),
    attribute<&P::conv_eps>("conv_eps").positive().required_with("conv_weight"),
    out<&P::grad_residual>("grad_residual", "A[T,n,d]"), grad_kv_group<P>(),
    out<&P::grad_weight_hidden>("grad_weight_hidden", "F32[n,d]")
        .may_alias("grad_weight_hidden_acc"),
    out<&P::grad_weight_embed>("grad_weight_embed", "F32[n,d]").may_alias("grad_weight_embed_acc"),
    out<&P::grad_conv_weight>("grad_conv_weight", "F32[n,d,w]", "conv_weight")
        .may_alias("grad_conv_weight_acc"),
    out<&P::grad_conv_norm_weight>("grad_conv_norm_weight", "F32[n,d]", "conv_weight")
        .may_alias("grad_conv_norm_weight_acc"),
    default_symbol("B", 1, "cu_seqlens"),
    // The gate's statistics again, its gradients, and those of its two norm weights.
    flops("23*T*n*d"), flops("5*n*d"), flops("T*n*d*(6*w+24)", "conv_weight"));

const P& params_of(const Call& call) { return *static_cast<const P*>(call.params); }

void check_arguments(const Schema& schema, const Bound& bound, const void* params) {
  const P& p = *static_cast<const P*>(params);
  check_sequences(schema, p.cu_seqlens, bound["T"]);
  if (p.conv_weight) return;
  const auto refuse = [&](const char* name, const Tensor& target) {
    if (target) fail_tensor(schema, name, "none without 'conv_weight'", describe(target));
  };
  refuse("grad_conv_weight_acc", p.grad_conv_weight_acc);
  refuse("grad_conv_norm_weight_acc", p.grad_conv_norm_weight_acc);
}

// Without the arrays of the workspace.
LayerBackwardArgs make_args(const Call& call) {
  const P& p = params_of(call);
  LayerBackwardArgs a;
  a.gate = gate_bwd_call_args(p, call.bound);
  a.gate.gate.weight_stream_stride = a.gate.gate.hidden;
  a.gate.grad_value_path = a.gate.grad_out;
  if (!p.conv_weight) return a;
  a.conv = short_conv(p, call.bound);
  a.sums = conv_sums(p, call.bound, a.gate.gate.activation);
  return a;
}

bool has_conv(const LayerBackwardArgs& a) { return a.conv.conv_weight != nullptr; }

// By the operators themselves, on the implementation of the same name.
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
void reduce_gate_weights(const Call& call, float* partials, int64_t count) {
  const P& p = params_of(call);
  grad_w_reduce(call.context, {.grad_weight_partial = {partials,
                                                       DType::f32,
                                                       {count, call.bound["n"], call.bound["d"]},
                                                       p.residual.device,
                                                       p.residual.device_index},
                               .weight_hidden = p.weight_hidden,
                               .weight_embed = p.weight_embed,
                               .grad_weight_hidden_acc = p.grad_weight_hidden_acc,
                               .grad_weight_embed_acc = p.grad_weight_embed_acc,
                               .grad_weight_hidden = p.grad_weight_hidden,
                               .grad_weight_embed = p.grad_weight_embed});
}

int64_t chunk_count(const LayerBackwardArgs& a) {
  const int64_t tokens = a.gate.gate.tokens;
  return has_conv(a) ? conv_bwd_chunks(tokens) : tokens == 0 ? 0 : chunks_of_tokens(tokens);
}

// Arrays of one call of the SIMD kernels; every piece of the chunks has scratch of its own.
struct Scratch {
  float* fused;
  float* gate_partials;
  float* prepared = nullptr;
  float* conv_partials = nullptr;
  float* pieces = nullptr;
  int64_t floats_of_piece = 0;
};

Scratch take_scratch(Workspace& workspace, const LayerBackwardArgs& a, const Pieces& pieces) {
  const GateForwardArgs& gate = a.gate.gate;
  const int64_t weights = gate.streams * gate.hidden;
  Scratch s{workspace.take<float>(weights), workspace.take<float>(chunk_count(a) * weights)};
  if (!has_conv(a)) return s;
  const auto element = static_cast<int64_t>(size_of(gate.activation));
  const LayerBackwardSizes sizes = layer_bwd_sizes(
      gate.tokens, gate.streams, gate.hidden, conv_history(a.conv.taps, a.conv.dilation), element);
  s.prepared =
      workspace.take<float>(conv_bwd_prepared_floats(a.conv.taps, gate.streams, gate.hidden));
  s.conv_partials = workspace.take<float>(a.sums.partials.floats());
  s.floats_of_piece = whole_lines(sizes.floats());
  s.pieces = workspace.take<float>(s.floats_of_piece * pieces.count);
  return s;
}

Pieces cut_chunks(const Call& call, const LayerBackwardArgs& a) {
  return {call.context, chunk_count(a), 1};
}

size_t cpu_workspace(const Call& call) {
  const LayerBackwardArgs args = make_args(call);
  Workspace workspace(nullptr);
  take_scratch(workspace, args, cut_chunks(call, args));
  return workspace.bytes();
}

template <auto Gate>
void run_gate_alone(const Call& call, const LayerBackwardArgs& args) {
  const int64_t tokens = args.gate.gate.tokens, hidden = args.gate.gate.hidden;
  parallel_chunks(call.context, tokens, tokens_of_chunk(tokens),
                  [&](int64_t chunk, int64_t begin, int64_t end) {
                    float* partial = args.gate_partials + chunk * args.gate.gate.streams * hidden;
                    Gate(args.gate, begin, end, GradWeightRows{partial, hidden});
                  });
}

template <auto Gate, auto Prepare, auto Chunks, auto Sums>
void run_cpu(const Call& call) {
  LayerBackwardArgs args = make_args(call);
  const Pieces pieces = cut_chunks(call, args);
  Workspace workspace(call.context.workspace());
  const Scratch scratch = take_scratch(workspace, args, pieces);
  fuse_weights(call, scratch.fused);
  args.gate.gate.weight_fused = scratch.fused;
  args.gate_partials = scratch.gate_partials;
  if (!has_conv(args)) {
    run_gate_alone<Gate>(call, args);
    return reduce_gate_weights(call, scratch.gate_partials, chunk_count(args));
  }
  const GateForwardArgs& gate = args.gate.gate;
  args.conv.prepared = scratch.prepared;
  args.sums.prepared = scratch.prepared;
  args.sums.partials.data = scratch.conv_partials;
  ConvForwardArgs to_prepare;
  to_prepare.streams = gate.streams;
  to_prepare.hidden = gate.hidden;
  to_prepare.activation = gate.activation;
  to_prepare.conv = args.conv;
  parallel_for(call.context, gate.streams, 1,
               [&](int64_t begin, int64_t end) { Prepare(to_prepare, begin, end); });
  pieces.run(call.context, [&](int64_t piece, int64_t begin, int64_t end) {
    Chunks(args, begin, end, scratch.pieces + piece * scratch.floats_of_piece);
  });
  parallel_for(call.context, gate.streams * conv_sum_blocks(gate.hidden), 8,
               [&](int64_t begin, int64_t end) { Sums(args.sums, begin, end); });
  reduce_gate_weights(call, scratch.gate_partials, chunk_count(args));
}

template <class Real>
struct ReferenceScratch {
  float *fused, *gate_partial;
  LayerBackwardArrays<Real> arrays{};

  ReferenceScratch(Workspace& workspace, const LayerBackwardArgs& a) {
    const GateForwardArgs& gate = a.gate.gate;
    const int64_t rows = gate.tokens * gate.streams;
    fused = workspace.take<float>(gate.streams * gate.hidden);
    gate_partial = workspace.take<float>(gate.streams * gate.hidden);
    arrays.slopes = workspace.take<Real>(rows);
    if (!has_conv(a)) return;
    arrays.gates = workspace.take<LayerGate<Real>>(rows);
    arrays.grad_conv = workspace.take<Real>(rows * gate.hidden);
    arrays.grad_input = workspace.take<Real>(rows * gate.hidden);
  }
};

template <class Real>
size_t reference_workspace(const Call& call) {
  Workspace workspace(nullptr);
  ReferenceScratch<Real>(workspace, make_args(call));
  return workspace.bytes();
}

template <class Real>
void run_reference(const Call& call) {
  LayerBackwardArgs args = make_args(call);
  Workspace workspace(call.context.workspace());
  const ReferenceScratch<Real> s(workspace, args);
  const GateForwardArgs& gate = args.gate.gate;
  const LayerBackwardArrays<Real>& arrays = s.arrays;
  fuse_weights(call, s.fused);
  args.gate.gate.weight_fused = s.fused;
  const auto for_tokens = [&](const auto& body) {
    parallel_for(call.context, gate.tokens, 1, body);
  };
  if (has_conv(args)) {
    for_tokens([&](int64_t begin, int64_t end) {
      layer_bwd_reference_gates<Real>(args, arrays.gates, begin, end);
    });
    for_tokens([&](int64_t begin, int64_t end) {
      layer_bwd_reference_conv<Real>(args, arrays, begin, end);
    });
    for_tokens([&](int64_t begin, int64_t end) {
      layer_bwd_reference_inputs<Real>(args, arrays, begin, end);
    });
    parallel_for(call.context, gate.streams, 1, [&](int64_t begin, int64_t end) {
      layer_bwd_reference_sums<Real>(args, arrays, begin, end);
    });
    for_tokens([&](int64_t begin, int64_t end) {
      layer_bwd_reference_tokens<Real>(args, arrays, begin, end);
    });
  } else {
    for_tokens([&](int64_t begin, int64_t end) {
      gate_bwd_reference_tokens<Real>(args.gate, arrays.slopes, begin, end);
    });
  }
  gate_bwd_reference_chunk<Real>(args.gate, arrays.slopes, 0, gate.tokens,
                                 GradWeightRows{s.gate_partial, gate.hidden});
  reduce_gate_weights(call, s.gate_partial, gate.tokens == 0 ? 0 : 1);
}

#if EHC_HAS_CUDA
struct DeviceScratch {
  float *fused, *gate_partials;
  float* by_token = nullptr;
  GateStatistics statistics;
  LayerGradArrays arrays{};

  DeviceScratch(Workspace& workspace, const LayerBackwardArgs& a) {
    const GateForwardArgs& gate = a.gate.gate;
    const int64_t weights = gate.streams * gate.hidden;
    fused = workspace.take<float>(weights);
    gate_partials = workspace.take<float>(gate_weight_partials(gate.tokens) * weights);
    const int64_t floats = gate_bwd_token_floats(gate.tokens, gate.streams, gate.hidden);
    if (floats > 0) by_token = workspace.take<float>(floats);
    statistics = take_statistics(workspace, gate.tokens, gate.streams);
    if (has_conv(a)) arrays = take_layer_grad_arrays(workspace, gate, a.sums.partials);
  }
};

size_t cuda_workspace(const Call& call) {
  Workspace workspace(nullptr);
  DeviceScratch(workspace, make_args(call));
  return workspace.bytes();
}

void run_cuda(const Call& call) {
  LayerBackwardArgs args = make_args(call);
  Workspace workspace(call.context.workspace());
  const DeviceScratch s(workspace, args);
  const int device = call.context.device_index();
  void* stream = call.context.stream();
  GateForwardArgs& gate = args.gate.gate;
  if (gate.tokens > 0) fuse_weights(call, s.fused);
  gate.weight_fused = s.fused;
  gate.value_mean_square = s.arrays.value_mean_square;
  compute_statistics(s.statistics, gate, device, stream);
  if (has_conv(args)) {
    args.sums.partials.data = s.arrays.conv.partials;
    layer_bwd_cuda(args, s.arrays, device, stream);
    args.gate.grad_value_path = {s.arrays.grad_value, gate.streams * conv_prepared_row(gate.hidden),
                                 conv_prepared_row(gate.hidden)};
    args.gate.value_path_is_f32 = true;
  }
  gate_bwd_cuda(args.gate, {s.gate_partials, gate.streams * gate.hidden, gate.hidden, s.by_token},
                device, stream);
  reduce_gate_weights(call, s.gate_partials, gate_weight_partials(gate.tokens));
}
#endif

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_cuda, &cuda_workspace},
#endif
#define EHC_LIST(isa)                                                             \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>,                       \
   &run_cpu<&isa::gate_bwd_chunk, &isa::conv_bwd_prepare, &isa::layer_bwd_chunks, \
            &isa::conv_bwd_sums>,                                                 \
   &cpu_workspace},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_reference<double>, &reference_workspace<double>},
    {"reference.f32", Device::cpu, nullptr, &run_reference<float>, &reference_workspace<float>},
};

constexpr Operator kLayerBackward = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.rules = &check_arguments;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(layer_bwd, LayerBackward, kLayerBackward);
EHC_REGISTER(layer_bwd, &kLayerBackward);

}  // namespace ehc::engram
