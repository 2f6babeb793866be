#include "ehc/engram/grad_w_reduce.h"

#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "ops/engram/grad_w_reduce/grad_w_reduce_args.h"

namespace ehc::engram {

void grad_w_reduce_reference(const GradWReduceArgs& args, int64_t stream, int64_t begin,
                             int64_t end);
void grad_w_reduce_reference_f32(const GradWReduceArgs& args, int64_t stream, int64_t begin,
                                 int64_t end);
void grad_w_reduce_cuda(const GradWReduceArgs& args, int device, void* stream);

namespace {

using P = GradWReduce;

constexpr auto kTable = table(
    "engram.grad_w_reduce", "1.11", "gradients of the gate's norm weights from partial sums",
    in<&P::grad_weight_partial>("grad_weight_partial", "F32[P,n,d]"),
    in<&P::weight_hidden>("weight_hidden", "W[n,d]"),
    in<&P::weight_embed>("weight_embed", "W[n,d]"),
    in<&P::grad_weight_hidden_acc>("grad_weight_hidden_acc", "F32[n,d]").optional(),
    in<&P::grad_weight_embed_acc>("grad_weight_embed_acc", "F32[n,d]").optional(),
    out<&P::grad_weight_hidden>("grad_weight_hidden", "F32[n,d]")
        .may_alias("grad_weight_hidden_acc"),
    out<&P::grad_weight_embed>("grad_weight_embed", "F32[n,d]").may_alias("grad_weight_embed_acc"),
    flops("(P+4)*n*d"));

WeightGradient weight_gradient(const Tensor& other, const Tensor& accumulated, const Tensor& grad) {
  return {{other.dtype, other.data, other.stride[0]},
          accumulated.as<const float>(),
          accumulated.stride[0],
          grad.as<float>(),
          grad.stride[0]};
}

GradWReduceArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  return {
      .partials = call.bound["P"],
      .streams = call.bound["n"],
      .hidden = call.bound["d"],
      .partial = p.grad_weight_partial.as<const float>(),
      .partial_stride = p.grad_weight_partial.stride[0],
      .partial_stream_stride = p.grad_weight_partial.stride[1],
      .of_hidden = weight_gradient(p.weight_embed, p.grad_weight_hidden_acc, p.grad_weight_hidden),
      .of_embed = weight_gradient(p.weight_hidden, p.grad_weight_embed_acc, p.grad_weight_embed)};
}

template <auto Columns>
void run_cpu(const Call& call) {
  const GradWReduceArgs args = make_args(call);
  const int64_t grain = 1 + 65536 / ((args.partials + 4) * args.streams);
  parallel_for(call.context, args.hidden, grain, [&](int64_t begin, int64_t end) {
    for (int64_t h = 0; h < args.streams; ++h) Columns(args, h, begin, end);
  });
}

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_on_device<&make_args, &grad_w_reduce_cuda>, nullptr},
#endif
#define EHC_LIST(isa)                                                                              \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run_cpu<&isa::grad_w_reduce_columns>, \
   nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_cpu<&grad_w_reduce_reference>, nullptr},
    {"reference.f32", Device::cpu, nullptr, &run_cpu<&grad_w_reduce_reference_f32>, nullptr},
};

constexpr Operator kGradWReduce = make_operator<P>(kTable, kImplementations);

}  // namespace

EHC_DEFINE_CALLS(grad_w_reduce, GradWReduce, kGradWReduce);
EHC_REGISTER(grad_w_reduce, &kGradWReduce);

}  // namespace ehc::engram
