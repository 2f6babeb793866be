#include "ehc/mhc/pre_apply.h"

#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/registry.h"
#include "ops/mhc/pre_apply/pre_apply_args.h"
#include "ops/mhc/shared/stream_call.h"

namespace ehc::mhc {

void pre_apply_fwd_cuda(const PreApplyForwardArgs& args, int device, void* stream);
void pre_apply_bwd_cuda(const PreApplyBackwardArgs& args, int device, void* stream);

namespace {

using F = PreApplyForward;
using B = PreApplyBackward;

constexpr auto kForwardTable =
    table("mhc.pre_apply_fwd", "2.8", "streams collapsed to the input of a layer",
          in<&F::residual>("residual", "A[T,n,d]"), in<&F::pre>("pre", "F32[T,n]"),
          out<&F::layer_input>("layer_input", "A[T,d]").exact(), flops("2*T*n*d"));

constexpr auto kBackwardTable = table(
    "mhc.pre_apply_bwd", "2.8", "gradients of the collapse",
    in<&B::grad_layer_input>("grad_layer_input", "A[T,d]"),
    in<&B::residual>("residual", "A[T,n,d]"), in<&B::pre>("pre", "F32[T,n]"),
    in<&B::grad_residual_acc>("grad_residual_acc", "A[T,n,d]").optional(),
    out<&B::grad_residual>("grad_residual", "A[T,n,d]").exact().may_alias("grad_residual_acc"),
    out<&B::grad_pre>("grad_pre", "F32[T,n]"), flops("4*T*n*d"));

PreApplyForwardArgs forward_args(const Call& call) {
  const F& p = *static_cast<const F*>(call.params);
  const StreamSizes sizes = stream_sizes(call.bound);
  return {.sizes = sizes,
          .residual = stream_rows(p.residual),
          .pre = coefficients(p.pre),
          .layer_input = stream_rows(p.layer_input),
          .streaming = exceeds_cache(sizes, sizes.streams + 1)};
}

template <auto Kernel>
void run_forward(const Call& call) {
  const PreApplyForwardArgs args = forward_args(call);
  for_each_tile(call.context, args.sizes, [&](const Tile& tile) { Kernel(args, tile); });
}

PreApplyBackwardArgs backward_args(const Call& call) {
  const B& p = *static_cast<const B*>(call.params);
  const StreamSizes sizes = stream_sizes(call.bound);
  const bool adds = p.grad_residual_acc.present();
  const bool in_place = adds && p.grad_residual.data == p.grad_residual_acc.data;
  return {.sizes = sizes,
          .grad_layer_input = stream_rows(p.grad_layer_input),
          .residual = stream_rows(p.residual),
          .pre = coefficients(p.pre),
          .grad_residual_acc = stream_rows(p.grad_residual_acc),
          .grad_residual = stream_rows(p.grad_residual),
          .grad_pre = coefficients(p.grad_pre),
          .streaming = !in_place && exceeds_cache(sizes, (adds ? 3 : 2) * sizes.streams + 1)};
}

template <auto Tokens>
void run_backward(const Call& call) {
  const PreApplyBackwardArgs args = backward_args(call);
  parallel_for(call.context, args.sizes.tokens, tokens_of_grain(args.sizes),
               [&](int64_t begin, int64_t end) { Tokens(args, begin, end); });
}

constexpr Implementation kForwardImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_on_device<&forward_args, &pre_apply_fwd_cuda>, nullptr},
#endif
#define EHC_LIST(isa)                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, \
   &run_forward<&isa::pre_apply_fwd_tile>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_forward<&pre_apply_fwd_reference<double>>,
         nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_forward<&pre_apply_fwd_reference<float>>, nullptr},
};

constexpr Implementation kBackwardImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_on_device<&backward_args, &pre_apply_bwd_cuda>, nullptr},
#endif
#define EHC_LIST(isa)                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, \
   &run_backward<&isa::pre_apply_bwd_tokens>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_backward<&pre_apply_bwd_reference<double>>,
         nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_backward<&pre_apply_bwd_reference<float>>,
     nullptr},
};

constexpr Operator kPreApplyForward = make_operator<F>(kForwardTable, kForwardImplementations);
constexpr Operator kPreApplyBackward = make_operator<B>(kBackwardTable, kBackwardImplementations);

}  // namespace

EHC_DEFINE_CALLS(pre_apply_fwd, PreApplyForward, kPreApplyForward);
EHC_DEFINE_CALLS(pre_apply_bwd, PreApplyBackward, kPreApplyBackward);
EHC_REGISTER(pre_apply, &kPreApplyForward, &kPreApplyBackward);

}  // namespace ehc::mhc
