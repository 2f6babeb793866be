// What the backward of a sublayer's entry has of its own in plain loops, in double and in float.
#include <algorithm>
#include <cmath>

#include "ops/mhc/pre/pre_args.h"
#include "ops/mhc/shared/rms_math.h"
#include "ops/mhc/shared/stream_reference.h"

namespace ehc::mhc {

template <class Real>
void layer_norm_bwd_reference(const LayerNormBackwardArgs& a, int64_t begin, int64_t end,
                              float* grad_weight) {
  const int64_t d = a.sizes.hidden;
  std::fill_n(grad_weight, d, 0.0F);
  for (int64_t t = begin; t < end; ++t) {
    const auto row = [&](int64_t c) -> Real { return load(a.sizes, a.rows, t, 0, c); };
    const auto grad = [&](int64_t c) -> Real { return load(a.sizes, a.grad, t, 0, c); };
    const auto weight = [&](int64_t c) -> Real { return load_float(a.weight, a.weight_type, c); };
    Real squares = 0;
    Real product = 0;
    for (int64_t c = 0; c < d; ++c) {
      squares += row(c) * row(c);
      product += grad(c) * weight(c) * row(c);
    }
    const auto factor = rms_factor<Real>({d, a.eps, false}, squares);
    const Real slope = product * factor * factor * factor / static_cast<Real>(d);
    for (int64_t c = 0; c < d; ++c) {
      const Real x = row(c);  // its place may be that of the gradient
      grad_weight[c] = static_cast<float>(grad_weight[c] + x * factor * grad(c));
      store(a.sizes, a.grad_rows, t, 0, c, grad(c) * weight(c) * factor - slope * x);
    }
  }
}

template <class Real>
void grad_pre_reference(const GradPreArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t i = 0; i < a.sizes.streams; ++i) {
      Real sum = 0;
      for (int64_t c = 0; c < a.sizes.hidden; ++c) {
        sum = std::fma(static_cast<Real>(load(a.sizes, a.grad_row, t, 0, c)),
                       static_cast<Real>(load(a.sizes, a.residual, t, i, c)), sum);
      }
      store(a.grad_pre, t, 0, i, sum);
    }
  }
}

#define EHC_INSTANTIATE(Real)                                                                  \
  template void layer_norm_bwd_reference<Real>(const LayerNormBackwardArgs&, int64_t, int64_t, \
                                               float*);                                        \
  template void grad_pre_reference<Real>(const GradPreArgs&, int64_t, int64_t)
EHC_INSTANTIATE(double);
EHC_INSTANTIATE(float);
#undef EHC_INSTANTIATE

}  // namespace ehc::mhc
