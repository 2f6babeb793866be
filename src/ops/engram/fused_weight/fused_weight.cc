#include "ehc/engram/fused_weight.h"

#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "ops/engram/fused_weight/fused_weight_args.h"

namespace ehc::engram {

void fused_weight_reference(const FusedWeightArgs& args, int64_t begin, int64_t end);
void fused_weight_reference_f32(const FusedWeightArgs& args, int64_t begin, int64_t end);
void fused_weight_cuda(const FusedWeightArgs& args, int device, void* stream);

namespace {

using P = FusedWeight;

constexpr auto kTable =
    table("engram.fused_weight", "1.8", "product of the gate's norm weights",
          in<&P::weight_hidden>("weight_hidden", "W[n,d]"),
          in<&P::weight_embed>("weight_embed", "W[n,d]"),
          out<&P::weight_fused>("weight_fused", "F32[n,d]").exact(), flops("n*d"));

FusedWeightArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  return {.streams = call.bound["n"],
          .hidden = call.bound["d"],
          .hidden_type = p.weight_hidden.dtype,
          .hidden_weight = p.weight_hidden.data,
          .hidden_weight_stream_stride = p.weight_hidden.stride[0],
          .embed_type = p.weight_embed.dtype,
          .embed_weight = p.weight_embed.data,
          .embed_weight_stream_stride = p.weight_embed.stride[0],
          .fused = p.weight_fused.as<float>(),
          .fused_stream_stride = p.weight_fused.stride[0]};
}

template <auto Columns>
void run_cpu(const Call& call) {
  const FusedWeightArgs args = make_args(call);
  parallel_for(call.context, args.hidden, 4096,
               [&](int64_t begin, int64_t end) { Columns(args, begin, end); });
}

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_on_device<&make_args, &fused_weight_cuda>, nullptr},
#endif
#define EHC_LIST(isa)                                                                             \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run_cpu<&isa::fused_weight_columns>, \
   nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_cpu<&fused_weight_reference>, nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_cpu<&fused_weight_reference_f32>, nullptr},
};

constexpr Operator kFusedWeight = make_operator<P>(kTable, kImplementations);

}  // namespace

EHC_DEFINE_CALLS(fused_weight, FusedWeight, kFusedWeight);
EHC_REGISTER(fused_weight, &kFusedWeight);

}  // namespace ehc::engram
