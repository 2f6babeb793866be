// mhc.head_mix_fwd and mhc.head_mix_bwd in plain loops, in double and in float.
#include "ops/mhc/head_mix/head_mix_args.h"
#include "ops/mhc/shared/stream_reference.h"
#include "ops/mhc/split/split_math.h"

namespace ehc::mhc {

template <class Real>
void head_mix_fwd_reference(const HeadMixForwardArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t j = 0; j < a.streams; ++j) {
      const auto u = mix_logit<Real>(load(a.mixes, t, 0, j), *a.scale, a.base[j]);
      store(a.pre, t, 0, j, mix_gate<Real>(u, 1, a.pre_eps));
    }
  }
}

template <class Real>
void head_mix_bwd_reference(const HeadMixBackwardArgs& a, int64_t begin, int64_t end, float* scale,
                            float* base) {
  const Real factor = *a.scale;
  Real of_scale = 0;
  for (int64_t j = 0; j < a.streams; ++j) {
    Real of_base = 0;
    for (int64_t t = begin; t < end; ++t) {
      const Real mix = load(a.mixes, t, 0, j);
      const auto u = mix_logit<Real>(mix, factor, a.base[j]);
      const auto grad = mix_gate_gradient<Real>(u, 1, load(a.grad_pre, t, 0, j));
      of_base += grad;
      of_scale = std::fma(grad, mix, of_scale);
      store(a.grad_mixes, t, 0, j, grad * factor);
    }
    base[j] = static_cast<float>(of_base);
  }
  *scale = static_cast<float>(of_scale);
}

template void head_mix_fwd_reference<double>(const HeadMixForwardArgs&, int64_t, int64_t);
template void head_mix_fwd_reference<float>(const HeadMixForwardArgs&, int64_t, int64_t);
template void head_mix_bwd_reference<double>(const HeadMixBackwardArgs&, int64_t, int64_t, float*,
                                             float*);
template void head_mix_bwd_reference<float>(const HeadMixBackwardArgs&, int64_t, int64_t, float*,
                                            float*);

}  // namespace ehc::mhc
