#include "ehc/mhc/reduce_partials.h"

#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "ops/mhc/reduce_partials/reduce_partials_args.h"
#include "ops/mhc/shared/group_call.h"

namespace ehc::mhc {

void reduce_partials_fwd_cuda(const ReducePartialsForwardArgs& args, int64_t tokens, int device,
                              void* stream);
void reduce_partials_bwd_cuda(const ReducePartialsBackwardArgs& args, int64_t tokens, int device,
                              void* stream);

namespace {

using F = ReducePartialsForward;
using B = ReducePartialsBackward;

constexpr auto kForwardTable =
    table("mhc.reduce_partials_fwd", "2.4", "sums of a projection, normalised by the token's RMS",
          in<&F::mul_partial>("mul_partial", "F32[S,T,G?,M]"),
          in<&F::sqr_partial>("sqr_partial", "F32[S,T,G?]"), attribute<&F::k>("k").at_least(1),
          attribute<&F::norm_eps>("norm_eps").positive(), attribute<&F::rms>("rms", "mean/norm"),
          out<&F::mixes>("mixes", "F32[T,M]").exact(), out<&F::mul>("mul", "F32[T,G?,M]").exact(),
          out<&F::sqr>("sqr", "F32[T,G?]").exact(), flops("T*G*(S*(M+1)+M)"));

constexpr auto kBackwardTable =
    table("mhc.reduce_partials_bwd", "2.4", "gradients of the normalised projection",
          in<&B::grad_mixes>("grad_mixes", "F32[T,M]"), in<&B::mul>("mul", "F32[T,G?,M]"),
          in<&B::sqr>("sqr", "F32[T,G?]"), attribute<&B::k>("k").at_least(1),
          attribute<&B::norm_eps>("norm_eps").positive(), attribute<&B::rms>("rms", "mean/norm"),
          out<&B::grad_mul>("grad_mul", "F32[T,G?,M]").exact(),
          out<&B::grad_sqr>("grad_sqr", "F32[T,G?]"), flops("T*G*(3*M+5)"));

template <class P>
void check_groups_divide(const Schema& schema, const Bound& bound, const void* params) {
  const int64_t k = *static_cast<const P*>(params)->k;
  if (k % bound["G"] == 0) return;
  fail_attribute(schema, "k", "a multiple of G = " + std::to_string(bound["G"]), std::to_string(k));
}

constexpr int64_t kGrain = 256;  // tokens

ReducePartialsForwardArgs forward_args(const Call& call) {
  const F& p = *static_cast<const F*>(call.params);
  const Bound& b = call.bound;
  return {.splits = b["S"],
          .groups = b["G"],
          .mixes = b["M"],
          .rms = rms_of(p, *p.k / b["G"]),
          .mul_partial = partial_rows(p.mul_partial, 4),
          .sqr_partial = partial_rows(p.sqr_partial, 3),
          .mixed = group_rows(p.mixes, 3),
          .mul = group_rows(p.mul, 3),
          .sqr = group_rows(p.sqr, 2)};
}

template <auto Tokens>
void run_forward(const Call& call) {
  const ReducePartialsForwardArgs args = forward_args(call);
  parallel_for(call.context, call.bound["T"], kGrain,
               [&](int64_t begin, int64_t end) { Tokens(args, begin, end); });
}

ReducePartialsBackwardArgs backward_args(const Call& call) {
  const B& p = *static_cast<const B*>(call.params);
  const Bound& b = call.bound;
  return {.groups = b["G"],
          .mixes = b["M"],
          .rms = rms_of(p, *p.k / b["G"]),
          .grad_mixed = group_rows(p.grad_mixes, 3),
          .mul = group_rows(p.mul, 3),
          .sqr = group_rows(p.sqr, 2),
          .grad_mul = group_rows(p.grad_mul, 3),
          .grad_sqr = group_rows(p.grad_sqr, 2)};
}

template <auto Tokens>
void run_backward(const Call& call) {
  const ReducePartialsBackwardArgs args = backward_args(call);
  parallel_for(call.context, call.bound["T"], kGrain,
               [&](int64_t begin, int64_t end) { Tokens(args, begin, end); });
}

constexpr Implementation kForwardImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_range_on_device<&forward_args, &reduce_partials_fwd_cuda>,
     nullptr},
#endif
#define EHC_LIST(isa)                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, \
   &run_forward<&isa::reduce_partials_fwd_tokens>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_forward<&reduce_partials_fwd_reference<double>>,
         nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_forward<&reduce_partials_fwd_reference<float>>,
     nullptr},
};

constexpr Implementation kBackwardImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_range_on_device<&backward_args, &reduce_partials_bwd_cuda>,
     nullptr},
#endif
#define EHC_LIST(isa)                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, \
   &run_backward<&isa::reduce_partials_bwd_tokens>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_backward<&reduce_partials_bwd_reference<double>>,
         nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_backward<&reduce_partials_bwd_reference<float>>,
     nullptr},
};

constexpr Operator kReducePartialsForward = [] {
  Operator op = make_operator<F>(kForwardTable, kForwardImplementations);
  op.rules = &check_groups_divide<F>;
  return op;
}();

constexpr Operator kReducePartialsBackward = [] {
  Operator op = make_operator<B>(kBackwardTable, kBackwardImplementations);
  op.rules = &check_groups_divide<B>;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(reduce_partials_fwd, ReducePartialsForward, kReducePartialsForward);
EHC_DEFINE_CALLS(reduce_partials_bwd, ReducePartialsBackward, kReducePartialsBackward);
EHC_REGISTER(reduce_partials, &kReducePartialsForward, &kReducePartialsBackward);

}  // namespace ehc::mhc
