#include "ehc/mhc/defect.h"

#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/registry.h"
#include "ops/mhc/defect/defect_args.h"
#include "ops/mhc/shared/stream_call.h"

namespace ehc::mhc {

template <class Real>
void defect_reference(const DefectArgs& args, int64_t begin, int64_t end);

void defect_cuda(const DefectArgs& args, int64_t tokens, int device, void* stream);

namespace {

using P = Defect;

constexpr auto kTable = table(
    "mhc.defect", "2.15", "how far mixing maps are from doubly stochastic",
    in<&P::comb>("comb", "F32[T,n,n]"),
    out<&P::row_defect>("row_defect", "F32[T]").exact().packed(),
    out<&P::column_defect>("column_defect", "F32[T]").exact().packed(),
    out<&P::spectral_bound>("spectral_bound", "F32[T]").exact().packed(), flops("2*T*(n*n+n+1)"));

DefectArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  return {.streams = call.bound["n"],
          .comb = coefficients(p.comb),
          .row_defect = p.row_defect.as<float>(),
          .column_defect = p.column_defect.as<float>(),
          .spectral_bound = p.spectral_bound.as<float>()};
}

template <auto Tokens>
void run(const Call& call) {
  const DefectArgs args = make_args(call);
  parallel_for(call.context, call.bound["T"], 1024,
               [&](int64_t begin, int64_t end) { Tokens(args, begin, end); });
}

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_range_on_device<&make_args, &defect_cuda>, nullptr},
#endif
#define EHC_LIST(isa) \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run<&isa::defect_tokens>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run<&defect_reference<double>>, nullptr},
    {"reference.f32", Device::cpu, nullptr, &run<&defect_reference<float>>, nullptr},
};

constexpr Operator kDefect = make_operator<P>(kTable, kImplementations);

}  // namespace

EHC_DEFINE_CALLS(defect, Defect, kDefect);
EHC_REGISTER(defect, &kDefect);

}  // namespace ehc::mhc
