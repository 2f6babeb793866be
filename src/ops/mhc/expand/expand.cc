#include "ehc/mhc/expand.h"

#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/registry.h"
#include "ops/mhc/expand/expand_args.h"
#include "ops/mhc/pre_apply/pre_apply_args.h"
#include "ops/mhc/shared/stream_call.h"

namespace ehc::mhc {

template <class Real>
void expand_bwd_reference(const PreApplyForwardArgs& args, const Tile& tile);

void expand_fwd_cuda(const ExpandForwardArgs& args, int device, void* stream);
// Without a look at the coefficients.
void expand_bwd_cuda(const PreApplyForwardArgs& args, int device, void* stream);

namespace {

using F = ExpandForward;
using B = ExpandBackward;

constexpr auto kForwardTable =
    table("mhc.expand_fwd", "2.1", "one hidden state becomes n streams",
          in<&F::hidden>("hidden", "A[T,d]"), attribute<&F::n>("n").between(1, 8).fixes("n"),
          out<&F::residual>("residual", "A[T,n,d]").exact());

constexpr auto kBackwardTable =
    table("mhc.expand_bwd", "2.1", "gradient of the expansion",
          in<&B::grad_residual>("grad_residual", "A[T,n,d]"),
          out<&B::grad_hidden>("grad_hidden", "A[T,d]").exact(), flops("T*(n-1)*d"));

ExpandForwardArgs forward_args(const Call& call) {
  const F& p = *static_cast<const F*>(call.params);
  const StreamSizes sizes = stream_sizes(call.bound);
  return {.sizes = sizes,
          .hidden = stream_rows(p.hidden),
          .residual = stream_rows(p.residual),
          .streaming = exceeds_cache(sizes, sizes.streams + 1)};
}

template <auto Kernel>
void run_forward(const Call& call) {
  const ExpandForwardArgs args = forward_args(call);
  for_each_tile(call.context, args.sizes, [&](const Tile& tile) { Kernel(args, tile); });
}

// Without coefficients.
PreApplyForwardArgs backward_args(const Call& call) {
  const B& p = *static_cast<const B*>(call.params);
  const StreamSizes sizes = stream_sizes(call.bound);
  return {.sizes = sizes,
          .residual = stream_rows(p.grad_residual),
          .pre = {},
          .layer_input = stream_rows(p.grad_hidden),
          .streaming = exceeds_cache(sizes, sizes.streams + 1)};
}

// The same coefficients for every token.
template <auto Kernel>
void run_backward(const Call& call) {
  float ones[kMaxStreams] = {1, 1, 1, 1, 1, 1, 1, 1};
  PreApplyForwardArgs args = backward_args(call);
  args.pre.data = ones;
  for_each_tile(call.context, args.sizes, [&](const Tile& tile) { Kernel(args, tile); });
}

constexpr Implementation kForwardImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_on_device<&forward_args, &expand_fwd_cuda>, nullptr},
#endif
#define EHC_LIST(isa)                                                                            \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run_forward<&isa::expand_fwd_tile>, \
   nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_forward<&expand_fwd_reference>, nullptr},
};

constexpr Implementation kBackwardImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_on_device<&backward_args, &expand_bwd_cuda>, nullptr},
#endif
#define EHC_LIST(isa)                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, \
   &run_backward<&isa::pre_apply_fwd_tile>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_backward<&expand_bwd_reference<double>>, nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_backward<&expand_bwd_reference<float>>, nullptr},
};

constexpr Operator kExpandForward = make_operator<F>(kForwardTable, kForwardImplementations);
constexpr Operator kExpandBackward = make_operator<B>(kBackwardTable, kBackwardImplementations);

}  // namespace

EHC_DEFINE_CALLS(expand_fwd, ExpandForward, kExpandForward);
EHC_DEFINE_CALLS(expand_bwd, ExpandBackward, kExpandBackward);
EHC_REGISTER(expand, &kExpandForward, &kExpandBackward);

}  // namespace ehc::mhc
