#include "ehc/engram/momentum_update.h"

#include "backends/cpu/cache.h"
#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "ops/engram/momentum_update/momentum_update_args.h"
#include "ops/engram/shared/optimizer_call.h"

namespace ehc::engram {

void momentum_update_reference(const MomentumUpdateArgs& args, int64_t begin, int64_t end);
void momentum_update_cuda(const MomentumUpdateArgs& args, int64_t rows, int device, void* stream);

namespace {

using P = MomentumUpdate;

constexpr auto kTable = table(
    "engram.momentum_update", "1.12a", "moving average of a table's gradient",
    in<&P::grad>("grad", "W[rows,hd]"), in<&P::momentum>("momentum", "W[rows,hd]"),
    attribute<&P::beta>("beta").between(0, 1), attribute<&P::nesterov>("nesterov"),
    out<&P::update>("update", "F32[rows,hd]"),
    out<&P::new_momentum>("momentum", "W[rows,hd]").typed_like("momentum").may_alias("momentum"),
    flops("3*rows*hd"), flops("3*rows*hd", "nesterov"));

MomentumUpdateArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  MomentumUpdateArgs a;
  a.width = call.bound["hd"];
  a.grad_type = p.grad.dtype;
  a.grad = p.grad.data;
  a.grad_stride = p.grad.stride[0];
  a.momentum_type = p.momentum.dtype;
  a.momentum = p.momentum.data;
  a.momentum_stride = p.momentum.stride[0];
  a.new_momentum = p.new_momentum.data;
  a.new_momentum_stride = p.new_momentum.stride[0];
  a.update = p.update.as<float>();
  a.update_stride = p.update.stride[0];
  a.factors = momentum_factors(*p.beta, *p.nesterov);
  const size_t element = size_of(a.grad_type) + 2 * size_of(a.momentum_type) + sizeof(float);
  a.streaming =
      static_cast<size_t>(call.bound["rows"] * a.width) * element > last_level_cache_bytes();
  return a;
}

template <auto Rows>
void run_cpu(const Call& call) {
  const int64_t rows = call.bound["rows"];
  const MomentumUpdateArgs a = make_args(call);
  parallel_for(call.context, rows, rows_of_grain(a.width),
               [&](int64_t begin, int64_t end) { Rows(a, begin, end); });
}

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr,
     &run_range_on_device<&make_args, &momentum_update_cuda, symbol("rows")>, nullptr},
#endif
#define EHC_LIST(isa)                                                                             \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run_cpu<&isa::momentum_update_rows>, \
   nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_cpu<&momentum_update_reference>, nullptr},
};

constexpr Operator kMomentumUpdate = make_operator<P>(kTable, kImplementations);

}  // namespace

EHC_DEFINE_CALLS(momentum_update, MomentumUpdate, kMomentumUpdate);
EHC_REGISTER(momentum_update, &kMomentumUpdate);

}  // namespace ehc::engram
