#include "ehc/engram/gate_bwd.h"

#include "backends/cpu/isa.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "core/token_chunks.h"
#include "core/workspace.h"
#include "ops/engram/shared/gate_bwd_call.h"
#include "ops/engram/shared/gate_bwd_reference.h"
#include "ops/engram/shared/gate_statistics.h"

namespace ehc::engram {

void gate_bwd_cuda(const GateBackwardArgs& args, const GradWeightPartials& partials, int device,
                   void* stream);

namespace {

using P = GateBackward;

constexpr auto kTable = table(
    "engram.gate_bwd", "1.10", "gradients of the gate", in<&P::grad_out>("grad_out", "A[T,n,d]"),
    in<&P::grad_value_path>("grad_value_path", "A[T,n,d]").optional(),
    in<&P::residual>("residual", "A[T,n,d]"), kv_group<P>(),
    in<&P::weight_fused>("weight_fused", "F32[n,d]"), in<&P::dot>("dot", "F32[T,n]").optional(),
    in<&P::alpha>("alpha", "F32[T,n]").optional(),
    in<&P::rstd_residual>("rstd_residual", "F32[T,n]").optional(),
    in<&P::rstd_key>("rstd_key", "F32[T,n]").optional(),
    all_or_none("dot alpha rstd_residual rstd_key"),
    in<&P::image_token_mask>("image_token_mask", "BOOL[T]").optional().packed(),
    attribute<&P::clamp>("clamp").positive(),
    attribute<&P::eps>("eps").positive().required_without("dot"),
    out<&P::grad_residual>("grad_residual", "A[T,n,d]"), grad_kv_group<P>(),
    out<&P::grad_weight_partial>("grad_weight_partial", "F32[P,n,d]"), flops("16*T*n*d"),
    flops("7*T*n*d", "!dot"));

void count_partials(Bound& bound, const void*) {
  bound.symbols.set(symbol("P"), chunks_of_tokens(bound["T"]));
}

GateBackwardArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  GateBackwardArgs a = gate_bwd_call_args(p, call.bound);
  a.gate.weight_fused = p.weight_fused.as<float>();
  a.gate.weight_stream_stride = p.weight_fused.stride[0];
  a.grad_value_path = p.grad_value_path ? gradient_rows(p.grad_value_path) : a.grad_out;
  return a;
}

// Calls body(begin, end, grad_weight) for every chunk of tokens.
template <class Body>
void for_each_chunk(const Call& call, const Body& body) {
  const Tensor& partial = static_cast<const P*>(call.params)->grad_weight_partial;
  const int64_t tokens = call.bound["T"];
  parallel_chunks(
      call.context, tokens, tokens_of_chunk(tokens),
      [&](int64_t chunk, int64_t begin, int64_t end) {
        body(begin, end,
             GradWeightRows{partial.as<float>() + chunk * partial.stride[0], partial.stride[1]});
      });
}

template <auto Chunk>
void run_cpu(const Call& call) {
  const GateBackwardArgs args = make_args(call);
  for_each_chunk(call, [&](int64_t begin, int64_t end, const GradWeightRows& grad_weight) {
    Chunk(args, begin, end, grad_weight);
  });
}

template <class Real>
size_t reference_workspace(const Call& call) {
  Workspace workspace(nullptr);
  workspace.take<Real>(call.bound["T"] * call.bound["n"]);
  return workspace.bytes();
}

template <class Real>
void run_reference(const Call& call) {
  const GateBackwardArgs args = make_args(call);
  Real* slopes =
      Workspace(call.context.workspace()).take<Real>(args.gate.tokens * args.gate.streams);
  parallel_for(call.context, args.gate.tokens, 1, [&](int64_t begin, int64_t end) {
    gate_bwd_reference_tokens<Real>(args, slopes, begin, end);
  });
  for_each_chunk(call, [&](int64_t begin, int64_t end, const GradWeightRows& grad_weight) {
    gate_bwd_reference_chunk<Real>(args, slopes, begin, end, grad_weight);
  });
}

#if EHC_HAS_CUDA
struct DeviceScratch {
  GateStatistics statistics{};
  float* by_token = nullptr;

  DeviceScratch(Workspace& workspace, const Call& call) {
    const Bound& bound = call.bound;
    if (!static_cast<const P*>(call.params)->dot) {
      statistics = take_statistics(workspace, bound["T"], bound["n"]);
    }
    const int64_t floats = gate_bwd_token_floats(bound["T"], bound["n"], bound["d"]);
    if (floats > 0) by_token = workspace.take<float>(floats);
  }
};

size_t cuda_workspace(const Call& call) {
  Workspace workspace(nullptr);
  DeviceScratch(workspace, call);
  return workspace.bytes();
}

void run_cuda(const Call& call) {
  const Tensor& partial = static_cast<const P*>(call.params)->grad_weight_partial;
  Workspace workspace(call.context.workspace());
  const DeviceScratch scratch(workspace, call);
  GateBackwardArgs args = make_args(call);
  if (args.gate.tokens == 0) return;
  if (args.gate.dot.data == nullptr) {
    compute_statistics(scratch.statistics, args.gate, call.context.device_index(),
                       call.context.stream());
  }
  gate_bwd_cuda(args, {partial.as<float>(), partial.stride[0], partial.stride[1], scratch.by_token},
                call.context.device_index(), call.context.stream());
}
#endif

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_cuda, &cuda_workspace},
#endif
#define EHC_LIST(isa)                                                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run_cpu<&isa::gate_bwd_chunk>, \
   nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_reference<double>, &reference_workspace<double>},
    {"reference.f32", Device::cpu, nullptr, &run_reference<float>, &reference_workspace<float>},
};

constexpr Operator kGateBackward = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.derive = &count_partials;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(gate_bwd, GateBackward, kGateBackward);
EHC_REGISTER(gate_bwd, &kGateBackward);

int64_t gate_weight_partials(int64_t tokens) { return tokens <= 0 ? 0 : chunks_of_tokens(tokens); }

}  // namespace ehc::engram
