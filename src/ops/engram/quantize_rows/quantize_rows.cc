#include "ehc/engram/quantize_rows.h"

#include <algorithm>
#include <string>

#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "ops/engram/quantize_rows/quantize_rows_args.h"

namespace ehc::engram {

void quantize_rows_reference(const QuantizeRowsArgs& args, int64_t begin, int64_t end);
void quantize_rows_cuda(const QuantizeRowsArgs& args, int64_t rows, int device, void* stream);

namespace {

using P = QuantizeRows;

constexpr auto kTable =
    table("engram.quantize_rows", "1.6", "table rows in their 8-bit format",
          in<&P::values>("values", "F32/BF16[rows,hd]"),
          attribute<&P::group>("group").at_least(1).fixes("group"),
          out<&P::weight>("weight", "F8_E4M3[rows,hd]"),
          out<&P::scale>("scale", "F8_E8M0[rows,hd/group]"), flops("2*rows*hd"));

// The group is an attribute here, so its error is said before the outputs' shapes are asked for.
void check_group(Bound& b, const void* params) {
  const int64_t group = static_cast<const P*>(params)->group;
  if (b["hd"] % group == 0) return;
  fail_attribute(kTable.view(), "group", "a divisor of hd = " + std::to_string(b["hd"]),
                 std::to_string(group));
}

QuantizeRowsArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  return {.type = p.values.dtype,
          .values = p.values.data,
          .values_stride = p.values.stride[0],
          .width = call.bound["hd"],
          .group = p.group,
          .weight = p.weight.as<uint8_t>(),
          .scale = p.scale.as<uint8_t>(),
          .weight_stride = p.weight.stride[0],
          .scale_stride = p.scale.stride[0]};
}

template <auto Rows>
void run_cpu(const Call& call) {
  const QuantizeRowsArgs args = make_args(call);
  parallel_for(call.context, call.bound["rows"], std::max<int64_t>(1, 16384 / args.width),
               [&](int64_t begin, int64_t end) { Rows(args, begin, end); });
}

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr,
     &run_range_on_device<&make_args, &quantize_rows_cuda, symbol("rows")>, nullptr},
#endif
#define EHC_LIST(isa) \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run_cpu<&isa::encode_rows>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_cpu<&quantize_rows_reference>, nullptr},
};

constexpr Operator kQuantizeRows = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.derive = &check_group;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(quantize_rows, QuantizeRows, kQuantizeRows);
EHC_REGISTER(quantize_rows, &kQuantizeRows);

}  // namespace ehc::engram
