#include "ehc/engram/gate_bwd.h"

#include "backends/cpu/isa.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "core/token_chunks.h"
#include "core/workspace.h"
#include "ops/engram/gate_bwd/gate_bwd_args.h"
#include "ops/engram/shared/gate_call.h"

namespace ehc::engram {

// `slopes` [T,n]: dL/dD of every token and stream.
template <class Real>
void gate_bwd_reference_tokens(const GateBackwardArgs& args, Real* slopes, int64_t begin,
                               int64_t end);
template <class Real>
void gate_bwd_reference_chunk(const GateBackwardArgs& args, const Real* slopes, int64_t begin,
                              int64_t end, const GradWeightRows& grad_weight);

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
    out<&P::grad_weight_partial>("grad_weight_partial", "F32[P,n,d]"));

void count_partials(Bound& bound, const void*) {
  bound.symbols.set(symbol("P"), chunks_of_tokens(bound["T"]));
}

GradientRows gradient_rows(const Tensor& t) {
  return {t.data, t.stride[0], t.rank == 3 ? t.stride[1] : 0};
}

GateBackwardArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  GateBackwardArgs a;
  a.gate = gate_inputs(p, call.bound);
  if (a.gate.tokens == 0) return a;
  a.gate.weight_fused = p.weight_fused.as<float>();
  a.gate.weight_stream_stride = p.weight_fused.stride[0];
  a.grad_out = gradient_rows(p.grad_out);
  a.grad_value_path = p.grad_value_path ? gradient_rows(p.grad_value_path) : a.grad_out;
  a.grad_residual = gradient_rows(p.grad_residual);
  a.grad_key = gradient_rows(grad_key_of(p));
  a.grad_value = gradient_rows(grad_value_of(p));
  const auto row_bytes = static_cast<size_t>(a.gate.hidden) * size_of(a.gate.activation);
  const auto rows = static_cast<size_t>(a.gate.tokens * (5 * a.gate.streams + 2));
  a.streaming = rows * row_bytes > last_level_cache_bytes();
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

constexpr Implementation kImplementations[] = {
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
