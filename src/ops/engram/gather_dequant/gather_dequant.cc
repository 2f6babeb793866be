#include "ehc/engram/gather_dequant.h"

#include <algorithm>

#include "backends/cpu/cache.h"
#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "ops/engram/gather_dequant/gather_dequant_args.h"
#include "ops/engram/shared/check_indices.h"

namespace ehc::engram {

void gather_dequant_reference(const GatherDequantArgs& args, int64_t begin, int64_t end);
void gather_dequant_cuda(const GatherDequantArgs& args, int64_t tokens, int device, void* stream);

namespace {

using P = GatherDequant;

constexpr auto kTable = table(
    "engram.gather_dequant", "models 2", "the addressed rows of an 8-bit table, side by side",
    in<&P::weight>("weight", "F8_E4M3/U8[rows,hd]"),
    in<&P::scale>("scale", "F8_E8M0/U8[rows,hd/group]"), in<&P::indices>("indices", "I32/I64[T,C]"),
    attribute<&P::group>("group").at_least(1).fixes("group"),
    call_choice("out_dtype", "BF16/F16/F32", "BF16"),
    out<&P::embedding>("embedding", "X:BF16/F16/F32[T,C*hd]").dtype_from("out_dtype"),
    flops("T*C*hd"));

GatherDequantArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  const Bound& b = call.bound;
  const auto values = static_cast<size_t>(b["T"] * b["C"] * b["hd"]);
  return {.weight = p.weight.as<const uint8_t>(),
          .scale = p.scale.as<const uint8_t>(),
          .weight_stride = p.weight.stride[0],
          .scale_stride = p.scale.stride[0],
          .width = b["hd"],
          .group = p.group,
          .columns = b["C"],
          .indices = row_indices_of(p.indices),
          .type = p.embedding.dtype,
          .embedding = p.embedding.data,
          .token_stride = p.embedding.stride[0],
          .streaming = values * (1 + size_of(p.embedding.dtype)) > last_level_cache_bytes()};
}

template <auto Rows>
void run_cpu(const Call& call) {
  const GatherDequantArgs args = make_args(call);
  if (args.columns == 0) return;
  const int64_t grain = std::max<int64_t>(1, 16384 / args.columns / args.width);
  parallel_for(call.context, call.bound["T"], grain,
               [&](int64_t begin, int64_t end) { Rows(args, begin, end); });
}

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_range_on_device<&make_args, &gather_dequant_cuda>,
     nullptr},
#endif
#define EHC_LIST(isa)                                                                           \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run_cpu<&isa::gather_decode_rows>, \
   nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_cpu<&gather_dequant_reference>, nullptr},
};

constexpr Operator kGatherDequant = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.rules = [](const Schema& schema, const Bound& b, const void* params) {
    check_row_indices(schema, b, static_cast<const P*>(params)->indices);
  };
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(gather_dequant, GatherDequant, kGatherDequant);
EHC_REGISTER(gather_dequant, &kGatherDequant);

}  // namespace ehc::engram
