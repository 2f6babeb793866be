#include "ehc/engram/dequant_rows.h"

#include <algorithm>

#include "backends/cpu/cache.h"
#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "ops/engram/dequant_rows/dequant_rows_args.h"

namespace ehc::engram {

void dequant_rows_reference(const DequantRowsArgs& args, int64_t begin, int64_t end);
void dequant_rows_cuda(const DequantRowsArgs& args, int64_t rows, int device, void* stream);

namespace {

using P = DequantRows;

constexpr auto kTable = table(
    "engram.dequant_rows", "models 2", "table rows from their 8-bit format",
    in<&P::weight>("weight", "F8_E4M3/U8[rows,hd]"),
    in<&P::scale>("scale", "F8_E8M0/U8[rows,hd/group]"),
    attribute<&P::group>("group").at_least(1).fixes("group"),
    call_choice("out_dtype", "BF16/F16/F32", "BF16"),
    out<&P::values>("values", "X:BF16/F16/F32[rows,hd]").dtype_from("out_dtype"), flops("rows*hd"));

DequantRowsArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  const auto values = static_cast<size_t>(call.bound["rows"] * call.bound["hd"]);
  return {.weight = p.weight.as<const uint8_t>(),
          .scale = p.scale.as<const uint8_t>(),
          .weight_stride = p.weight.stride[0],
          .scale_stride = p.scale.stride[0],
          .width = call.bound["hd"],
          .group = p.group,
          .type = p.values.dtype,
          .values = p.values.data,
          .values_stride = p.values.stride[0],
          .streaming = values * (1 + size_of(p.values.dtype)) > last_level_cache_bytes()};
}

template <auto Rows>
void run_cpu(const Call& call) {
  const DequantRowsArgs args = make_args(call);
  parallel_for(call.context, call.bound["rows"], std::max<int64_t>(1, 16384 / args.width),
               [&](int64_t begin, int64_t end) { Rows(args, begin, end); });
}

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr,
     &run_range_on_device<&make_args, &dequant_rows_cuda, symbol("rows")>, nullptr},
#endif
#define EHC_LIST(isa) \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run_cpu<&isa::decode_rows>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_cpu<&dequant_rows_reference>, nullptr},
};

constexpr Operator kDequantRows = make_operator<P>(kTable, kImplementations);

}  // namespace

EHC_DEFINE_CALLS(dequant_rows, DequantRows, kDequantRows);
EHC_REGISTER(dequant_rows, &kDequantRows);

}  // namespace ehc::engram
