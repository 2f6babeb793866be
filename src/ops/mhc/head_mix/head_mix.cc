#include "ehc/mhc/head_mix.h"

#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/registry.h"
#include "core/token_chunks.h"
#include "core/workspace.h"
#include "ops/mhc/head_mix/head_mix_args.h"
#include "ops/mhc/shared/stream_call.h"
#include "ops/mhc/split/split_args.h"

namespace ehc::mhc {

void head_mix_fwd_cuda(const HeadMixForwardArgs& args, int64_t tokens, int device, void* stream);
void head_mix_bwd_cuda(const HeadMixBackwardArgs& args, float* scale, float* base, int64_t tokens,
                       int device, void* stream);
void add_partials_cuda(const char* name, const PartialSum& first, const PartialSum& second,
                       int device, void* stream);

namespace {

using F = HeadMixForward;
using B = HeadMixBackward;

constexpr auto kForwardTable =
    table("mhc.head_mix_fwd", "2.11", "mixes that collapse the streams for the head",
          in<&F::mixes>("mixes", "F32[T,n]"), in<&F::scale>("scale", "F32[1]"),
          in<&F::base>("base", "F32[n]"), attribute<&F::pre_eps>("pre_eps").at_least(0),
          out<&F::pre>("pre", "F32[T,n]"), flops("4*T*n"));

constexpr auto kBackwardTable =
    table("mhc.head_mix_bwd", "2.11", "gradients of the head's mixes",
          in<&B::grad_pre>("grad_pre", "F32[T,n]"), in<&B::mixes>("mixes", "F32[T,n]"),
          in<&B::scale>("scale", "F32[1]"), in<&B::base>("base", "F32[n]"),
          in<&B::grad_scale_acc>("grad_scale_acc", "F32[1]").optional(),
          in<&B::grad_base_acc>("grad_base_acc", "F32[n]").optional(),
          out<&B::grad_mixes>("grad_mixes", "F32[T,n]"),
          out<&B::grad_scale>("grad_scale", "F32[1]").may_alias("grad_scale_acc"),
          out<&B::grad_base>("grad_base", "F32[n]").may_alias("grad_base_acc"), flops("10*T*n"));

constexpr int64_t kGrain = 1024;  // tokens

HeadMixForwardArgs forward_args(const Call& call) {
  const F& p = *static_cast<const F*>(call.params);
  return {.streams = call.bound["n"],
          .mixes = coefficients(p.mixes),
          .scale = p.scale.as<float>(),
          .base = p.base.as<float>(),
          .pre_eps = static_cast<float>(*p.pre_eps),
          .pre = coefficients(p.pre)};
}

template <auto Tokens>
void run_forward(const Call& call) {
  const HeadMixForwardArgs args = forward_args(call);
  parallel_for(call.context, call.bound["T"], kGrain,
               [&](int64_t begin, int64_t end) { Tokens(args, begin, end); });
}

// The sums of every chunk of tokens.
struct Partials {
  int64_t chunks;
  float* scale;  // F32[P,1]
  float* base;   // F32[P,n]

  Partials(Workspace& workspace, const Bound& bound)
      : chunks(chunks_of_tokens(bound["T"])),
        scale(workspace.take<float>(chunks)),
        base(workspace.take<float>(chunks * bound["n"])) {}
};

size_t backward_workspace(const Call& call) {
  Workspace workspace(nullptr);
  Partials(workspace, call.bound);
  return workspace.bytes();
}

HeadMixBackwardArgs backward_args(const Call& call) {
  const B& p = *static_cast<const B*>(call.params);
  return {.streams = call.bound["n"],
          .grad_pre = coefficients(p.grad_pre),
          .mixes = coefficients(p.mixes),
          .scale = p.scale.as<float>(),
          .base = p.base.as<float>(),
          .grad_mixes = coefficients(p.grad_mixes)};
}

// What becomes of the partials.
struct GradientSums {
  PartialSum scale, base;

  GradientSums(const Call& call, const Partials& partials) {
    const B& p = *static_cast<const B*>(call.params);
    const int64_t n = call.bound["n"];
    scale = {partials.chunks,         1, partials.scale, 1, p.grad_scale_acc.as<float>(),
             p.grad_scale.as<float>()};
    base = {partials.chunks,        n, partials.base, n, p.grad_base_acc.as<float>(),
            p.grad_base.as<float>()};
  }
};

template <auto Chunk, auto Add>
void run_backward(const Call& call) {
  const int64_t tokens = call.bound["T"];
  const int64_t n = call.bound["n"];
  Workspace workspace(call.context.workspace());
  const Partials partials(workspace, call.bound);
  const HeadMixBackwardArgs args = backward_args(call);
  parallel_chunks(call.context, tokens, tokens_of_chunk(tokens),
                  [&](int64_t chunk, int64_t begin, int64_t end) {
                    Chunk(args, begin, end, partials.scale + chunk, partials.base + chunk * n);
                  });
  const GradientSums sums(call, partials);
  Add(sums.scale);
  Add(sums.base);
}

#if EHC_HAS_CUDA
void run_backward_cuda(const Call& call) {
  const int device = call.context.device_index();
  void* stream = call.context.stream();
  Workspace workspace(call.context.workspace());
  const Partials partials(workspace, call.bound);
  head_mix_bwd_cuda(backward_args(call), partials.scale, partials.base, call.bound["T"], device,
                    stream);
  const GradientSums sums(call, partials);
  add_partials_cuda("mhc.head_mix_bwd", sums.scale, sums.base, device, stream);
}
#endif

constexpr Implementation kForwardImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_range_on_device<&forward_args, &head_mix_fwd_cuda>,
     nullptr},
#endif
#define EHC_LIST(isa)                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, \
   &run_forward<&isa::head_mix_fwd_tokens>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_forward<&head_mix_fwd_reference<double>>, nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_forward<&head_mix_fwd_reference<float>>, nullptr},
};

constexpr Implementation kBackwardImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_backward_cuda, &backward_workspace},
#endif
#define EHC_LIST(isa)                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, \
   &run_backward<&isa::head_mix_bwd_chunk, &isa::add_partials>, &backward_workspace},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr,
         &run_backward<&head_mix_bwd_reference<double>, &add_partials_reference<double>>,
         &backward_workspace},
    {"reference.f32", Device::cpu, nullptr,
     &run_backward<&head_mix_bwd_reference<float>, &add_partials_reference<float>>,
     &backward_workspace},
};

constexpr Operator kHeadMixForward = make_operator<F>(kForwardTable, kForwardImplementations);
constexpr Operator kHeadMixBackward = make_operator<B>(kBackwardTable, kBackwardImplementations);

}  // namespace

EHC_DEFINE_CALLS(head_mix_fwd, HeadMixForward, kHeadMixForward);
EHC_DEFINE_CALLS(head_mix_bwd, HeadMixBackward, kHeadMixBackward);
EHC_REGISTER(head_mix, &kHeadMixForward, &kHeadMixBackward);

}  // namespace ehc::mhc
