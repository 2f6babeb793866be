#include "ehc/engram/gate.h"

#include <algorithm>

#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "ops/engram/shared/gate_call.h"
#include "ops/engram/shared/gate_reference.h"

namespace ehc::engram {

void gate_fwd_cuda(const GateForwardArgs& args, int device, void* stream);

namespace {

using P = GateForward;

constexpr auto kTable = table(
    "engram.gate_fwd", "1.9", "gate between residual streams and the looked-up value",
    in<&P::residual>("residual", "A[T,n,d]"), kv_group<P>(),
    in<&P::weight_fused>("weight_fused", "F32[n,d]"),
    in<&P::image_token_mask>("image_token_mask", "BOOL[T]").optional().packed(),
    attribute<&P::eps>("eps").positive(), attribute<&P::clamp>("clamp").positive(),
    call_flag("save"), call_flag("inplace"), attribute<&P::mode>("mode", "add/value/stats"),
    out<&P::out>("out", "A[T,n,d]", "mode=add|mode=value").may_alias("residual"),
    out<&P::dot>("dot", "F32[T,n]", "save"), out<&P::alpha>("alpha", "F32[T,n]", "save|mode=stats"),
    out<&P::rstd_residual>("rstd_residual", "F32[T,n]", "save"),
    out<&P::rstd_key>("rstd_key", "F32[T,n]", "save"),
    out<&P::value_mean_square>("value_mean_square", "F32[T]", "mode=stats"),
    all_or_none("dot rstd_residual rstd_key"), flops("7*T*n*d"), flops("2*T*n*d", "mode=add"),
    flops("T*n*d", "mode=value"), flops("2*T*d", "mode=stats"));

void check_saving(const Schema& schema, const Bound&, const void* params) {
  const P& p = *static_cast<const P*>(params);
  if (p.mode != P::Mode::stats && p.dot.present() != p.alpha.present()) {
    fail_tensor(schema, "alpha",
                p.dot ? "F32[T,n] beside 'dot'" : "none without 'dot' (saved: all four or none)",
                describe(p.alpha));
  }
  if (p.dot && p.out.data != nullptr && p.out.data == p.residual.data) {
    fail_tensor(schema, "out",
                "memory apart from 'residual' when statistics are saved (inplace excludes save)",
                "the same memory");
  }
}

GateForwardArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  GateForwardArgs a = gate_call_args(p, call.bound);
  a.weight_fused = p.weight_fused.as<float>();
  a.weight_stream_stride = p.weight_fused.stride[0];
  a.value_mean_square = p.value_mean_square.as<float>();
  a.mode = static_cast<GateMode>(p.mode);  // same order
  return a;
}

template <auto Rows>
void run_cpu(const Call& call) {
  const GateForwardArgs args = make_args(call);
  const int64_t grain = std::max<int64_t>(1, 16384 / (args.streams * args.hidden));
  parallel_for(call.context, args.tokens, grain,
               [&](int64_t begin, int64_t end) { Rows(args, begin, end); });
}

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_on_device<&make_args, &gate_fwd_cuda>, nullptr},
#endif
#define EHC_LIST(isa) \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run_cpu<&isa::gate_fwd_rows>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_cpu<&gate_fwd_reference>, nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_cpu<&gate_fwd_reference_f32>, nullptr},
};

constexpr Operator kGateForward = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.rules = &check_saving;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(gate_fwd, GateForward, kGateForward);
EHC_REGISTER(gate, &kGateForward);

}  // namespace ehc::engram
