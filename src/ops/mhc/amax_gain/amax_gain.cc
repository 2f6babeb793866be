#include "ehc/mhc/amax_gain.h"

#include "backends/cpu/isa.h"
#include "core/device_call.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "ops/mhc/amax_gain/amax_gain_args.h"

namespace ehc::mhc {

template <class Real>
void amax_gain_reference(const AmaxGainArgs& args, int64_t begin, int64_t end);

void amax_gain_cuda(const AmaxGainArgs& args, int64_t tokens, int device, void* stream);

namespace {

using P = AmaxGain;

constexpr auto kTable = table(
    "mhc.amax_gain", "2.15", "how much mixing maps enlarge a signal",
    in<&P::comb>("comb", "F32[L,T,n,n]"), out<&P::forward_gain>("forward_gain", "F32[L,T]").exact(),
    out<&P::backward_gain>("backward_gain", "F32[L,T]").exact(),
    out<&P::composite_forward_gain>("composite_forward_gain", "F32[T]").exact().packed(),
    out<&P::composite_backward_gain>("composite_backward_gain", "F32[T]").exact().packed(),
    flops("2*L*T*n*n*(n+1)"), flops("2*T*n*n"));

LayerGains layer_gains(const Tensor& t) { return {t.as<float>(), t.stride[0], t.stride[1]}; }

AmaxGainArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  return {.layers = call.bound["L"],
          .streams = call.bound["n"],
          .comb = p.comb.as<float>(),
          .comb_layer_stride = p.comb.stride[0],
          .comb_token_stride = p.comb.stride[1],
          .comb_row_stride = p.comb.stride[2],
          .forward = layer_gains(p.forward_gain),
          .backward = layer_gains(p.backward_gain),
          .composite_forward = p.composite_forward_gain.as<float>(),
          .composite_backward = p.composite_backward_gain.as<float>()};
}

template <auto Tokens>
void run(const Call& call) {
  const AmaxGainArgs args = make_args(call);
  parallel_for(call.context, call.bound["T"], 256,
               [&](int64_t begin, int64_t end) { Tokens(args, begin, end); });
}

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_range_on_device<&make_args, &amax_gain_cuda>, nullptr},
#endif
#define EHC_LIST(isa) \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run<&isa::amax_gain_tokens>, nullptr},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run<&amax_gain_reference<double>>, nullptr},
    {"reference.f32", Device::cpu, nullptr, &run<&amax_gain_reference<float>>, nullptr},
};

constexpr Operator kAmaxGain = make_operator<P>(kTable, kImplementations);

}  // namespace

EHC_DEFINE_CALLS(amax_gain, AmaxGain, kAmaxGain);
EHC_REGISTER(amax_gain, &kAmaxGain);

}  // namespace ehc::mhc
