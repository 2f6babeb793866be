#include "ehc/mhc/sinkhorn.h"

#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/registry.h"
#include "ops/mhc/shared/mix_group.h"
#include "ops/mhc/shared/sinkhorn_call.h"
#include "ops/mhc/shared/stream_call.h"

namespace ehc::mhc {

void sinkhorn_fwd_cuda(const SinkhornForwardArgs& args, int64_t tokens, int device, void* stream);
void sinkhorn_bwd_cuda(const SinkhornBackwardArgs& args, int64_t tokens, int device, void* stream);

namespace {

using F = SinkhornForward;
using B = SinkhornBackward;

template <class P>
constexpr auto rule_attributes() {
  return std::tuple{attribute<&P::repeat>("repeat").between(1, 64).fixes("repeat"),
                    attribute<&P::eps>("eps").at_least(0),
                    attribute<&P::convention>("convention", "deepseek/megatron/log")};
}

constexpr auto kForwardTable =
    table("mhc.sinkhorn_fwd", "2.7", "logits made a doubly stochastic matrix",
          in<&F::comb_logits>("comb_logits", "F32[T,n,n]"), rule_attributes<F>(),
          out<&F::comb>("comb", "F32[T,n,n]"), flops(kSinkhornFlops));

constexpr auto kBackwardTable = table(
    "mhc.sinkhorn_bwd", "2.7", "gradient of the Sinkhorn iteration",
    in<&B::grad_comb>("grad_comb", "F32[T,n,n]"), in<&B::comb_logits>("comb_logits", "F32[T,n,n]"),
    rule_attributes<B>(), out<&B::grad_comb_logits>("grad_comb_logits", "F32[T,n,n]"),
    flops(kSinkhornBackwardFlops));

template <class P>
SinkhornRule rule_of(const P& p, const Bound& bound) {
  return sinkhorn_rule(bound["n"], *p.repeat, *p.eps, p.convention);
}

constexpr int64_t kGrain = 64;  // tokens

SinkhornForwardArgs forward_args(const Call& call) {
  const F& p = *static_cast<const F*>(call.params);
  return {rule_of(p, call.bound), coefficients(p.comb_logits), coefficients(p.comb)};
}

template <auto Tokens>
void run_forward(const Call& call) {
  const SinkhornForwardArgs args = forward_args(call);
  parallel_for(call.context, call.bound["T"], kGrain,
               [&](int64_t begin, int64_t end) { Tokens(args, begin, end); });
}

SinkhornBackwardArgs backward_args(const Call& call) {
  const B& p = *static_cast<const B*>(call.params);
  return {rule_of(p, call.bound), coefficients(p.grad_comb), coefficients(p.comb_logits),
          coefficients(p.grad_comb_logits)};
}

template <auto Tokens>
void run_backward(const Call& call) {
  const SinkhornBackwardArgs args = backward_args(call);
  parallel_for(call.context, call.bound["T"], kGrain,
               [&](int64_t begin, int64_t end) { Tokens(args, begin, end); });
}

constexpr Implementation kForwardImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_range_on_device<&forward_args, &sinkhorn_fwd_cuda>,
     nullptr},
#endif
#define EHC_LIST(isa)                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, \
   &run_forward<&isa::sinkhorn_fwd_tokens>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_forward<&sinkhorn_fwd_reference<double>>, nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_forward<&sinkhorn_fwd_reference<float>>, nullptr},
};

constexpr Implementation kBackwardImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_range_on_device<&backward_args, &sinkhorn_bwd_cuda>,
     nullptr},
#endif
#define EHC_LIST(isa)                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, \
   &run_backward<&isa::sinkhorn_bwd_tokens>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_backward<&sinkhorn_bwd_reference<double>>,
         nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_backward<&sinkhorn_bwd_reference<float>>, nullptr},
};

constexpr Operator kSinkhornForward = make_operator<F>(kForwardTable, kForwardImplementations);
constexpr Operator kSinkhornBackward = make_operator<B>(kBackwardTable, kBackwardImplementations);

}  // namespace

EHC_DEFINE_CALLS(sinkhorn_fwd, SinkhornForward, kSinkhornForward);
EHC_DEFINE_CALLS(sinkhorn_bwd, SinkhornBackward, kSinkhornBackward);
EHC_REGISTER(sinkhorn, &kSinkhornForward, &kSinkhornBackward);

}  // namespace ehc::mhc
