#include "ehc/engram/gather.h"

#include <algorithm>

#include "backends/cpu/cache.h"
#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "ops/engram/gather/gather_args.h"
#include "ops/engram/shared/check_indices.h"

namespace ehc::engram {

void gather_fwd_reference(const GatherForwardArgs& args, int64_t begin, int64_t end);
void gather_fwd_cuda(const GatherForwardArgs& args, int device, void* stream);

namespace {

using P = GatherForward;

constexpr auto kTable = table(
    "engram.gather_fwd", "1.6", "the addressed table rows, side by side",
    in<&P::table>("table", "BF16/F16/F32[rows,hd]"), in<&P::indices>("indices", "I32/I64[T,C]"),
    call_choice("out_dtype", "table/BF16/F16/F32", "table"),
    out<&P::embedding>("embedding", "X:BF16/F16/F32[T,C*hd]").dtype_from("out_dtype"));

GatherForwardArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  const Bound& b = call.bound;
  const auto read = static_cast<size_t>(b["T"] * b["C"] * b["hd"]) * size_of(p.table.dtype);
  const auto written = static_cast<size_t>(b["T"] * b["C"] * b["hd"]) * size_of(p.embedding.dtype);
  return {.tokens = b["T"],
          .columns = b["C"],
          .width = b["hd"],
          .table_type = p.table.dtype,
          .table = p.table.data,
          .table_row_stride = std::max(b["hd"], p.table.stride[0]),
          .indices = row_indices_of(p.indices),
          .out_type = p.embedding.dtype,
          .out = p.embedding.data,
          .out_token_stride = p.embedding.stride[0],
          .streaming = read + written > last_level_cache_bytes()};
}

void check_indices(const Schema& schema, const Bound& b, const void* params) {
  check_row_indices(schema, b, static_cast<const P*>(params)->indices);
}

template <auto Rows>
void run_cpu(const Call& call) {
  const GatherForwardArgs args = make_args(call);
  if (args.columns == 0) return;
  const int64_t grain = std::max<int64_t>(1, 16384 / (args.columns * args.width));
  parallel_for(call.context, args.tokens, grain,
               [&](int64_t begin, int64_t end) { Rows(args, begin, end); });
}

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_on_device<&make_args, &gather_fwd_cuda>, nullptr},
#endif
#define EHC_LIST(isa)                                                                        \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run_cpu<&isa::gather_fwd_rows>, \
   nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_cpu<&gather_fwd_reference>, nullptr},
};

constexpr Operator kGatherForward = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.rules = &check_indices;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(gather_fwd, GatherForward, kGatherForward);
EHC_REGISTER(gather, &kGatherForward);

}  // namespace ehc::engram
