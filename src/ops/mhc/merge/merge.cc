#include "ehc/mhc/merge.h"

#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/registry.h"
#include "ops/mhc/merge/merge_args.h"
#include "ops/mhc/shared/stream_call.h"

namespace ehc::mhc {

void merge_fwd_cuda(const MergeForwardArgs& args, int64_t columns, int device, void* stream);
void merge_bwd_cuda(const MergeBackwardArgs& args, int64_t columns, int device, void* stream);

namespace {

using F = MergeForward;
using B = MergeBackward;

constexpr auto kForwardTable =
    table("mhc.merge_fwd", "2.2", "weight of the RMS norm merged into the projection",
          in<&F::fn>("fn", "F32[M,K]"), in<&F::norm_weight>("norm_weight", "F32[K]"),
          out<&F::fn_merged>("fn_merged", "F32[M,K]").exact(), flops("M*K"));

constexpr auto kBackwardTable =
    table("mhc.merge_bwd", "2.2", "gradients of projection and norm weight",
          in<&B::grad_fn_merged>("grad_fn_merged", "F32[M,K]"), in<&B::fn>("fn", "F32[M,K]"),
          in<&B::norm_weight>("norm_weight", "F32[K]"),
          in<&B::grad_fn_acc>("grad_fn_acc", "F32[M,K]").optional(),
          in<&B::grad_norm_weight_acc>("grad_norm_weight_acc", "F32[K]").optional(),
          out<&B::grad_fn>("grad_fn", "F32[M,K]").exact().may_alias("grad_fn_acc"),
          out<&B::grad_norm_weight>("grad_norm_weight", "F32[K]")
              .exact()
              .may_alias("grad_norm_weight_acc"),
          flops("4*M*K"));

// Columns of which a thread takes at least so many.
int64_t grain_of(int64_t mixes) { return 32768 / mixes; }

MergeForwardArgs forward_args(const Call& call) {
  const F& p = *static_cast<const F*>(call.params);
  return {call.bound["M"], mix_rows(p.fn), p.norm_weight.as<float>(), mix_rows(p.fn_merged)};
}

template <auto Columns>
void run_forward(const Call& call) {
  const MergeForwardArgs args = forward_args(call);
  parallel_for(call.context, call.bound["K"], grain_of(args.mixes),
               [&](int64_t begin, int64_t end) { Columns(args, begin, end); });
}

MergeBackwardArgs backward_args(const Call& call) {
  const B& p = *static_cast<const B*>(call.params);
  return {.mixes = call.bound["M"],
          .grad_merged = mix_rows(p.grad_fn_merged),
          .fn = mix_rows(p.fn),
          .norm_weight = p.norm_weight.as<float>(),
          .grad_fn_acc = mix_rows(p.grad_fn_acc),
          .grad_weight_acc = p.grad_norm_weight_acc.as<float>(),
          .grad_fn = mix_rows(p.grad_fn),
          .grad_weight = p.grad_norm_weight.as<float>()};
}

template <auto Columns>
void run_backward(const Call& call) {
  const MergeBackwardArgs args = backward_args(call);
  parallel_for(call.context, call.bound["K"], grain_of(args.mixes),
               [&](int64_t begin, int64_t end) { Columns(args, begin, end); });
}

constexpr Implementation kForwardImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr,
     &run_range_on_device<&forward_args, &merge_fwd_cuda, symbol("K")>, nullptr},
#endif
#define EHC_LIST(isa)                                                                              \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run_forward<&isa::merge_fwd_columns>, \
   nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_forward<&merge_fwd_reference<double>>, nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_forward<&merge_fwd_reference<float>>, nullptr},
};

constexpr Implementation kBackwardImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr,
     &run_range_on_device<&backward_args, &merge_bwd_cuda, symbol("K")>, nullptr},
#endif
#define EHC_LIST(isa)                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, \
   &run_backward<&isa::merge_bwd_columns>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_backward<&merge_bwd_reference<double>>, nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_backward<&merge_bwd_reference<float>>, nullptr},
};

constexpr Operator kMergeForward = make_operator<F>(kForwardTable, kForwardImplementations);
constexpr Operator kMergeBackward = make_operator<B>(kBackwardTable, kBackwardImplementations);

}  // namespace

EHC_DEFINE_CALLS(merge_fwd, MergeForward, kMergeForward);
EHC_DEFINE_CALLS(merge_bwd, MergeBackward, kMergeBackward);
EHC_REGISTER(merge, &kMergeForward, &kMergeBackward);

}  // namespace ehc::mhc
