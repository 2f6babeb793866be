// mhc.reduce_partials_fwd and mhc.reduce_partials_bwd in plain loops, in double and in float.
#include <cmath>

#include "ops/mhc/reduce_partials/reduce_partials_args.h"
#include "ops/mhc/shared/pairwise_sum.h"

namespace ehc::mhc {

namespace {

float& element(const GroupRows& rows, int64_t split, int64_t token, int64_t group, int64_t j) {
  return rows
      .data[split * rows.split_stride + token * rows.token_stride + group * rows.group_stride + j];
}

template <class Real>
Real sum_of_splits(const GroupRows& partial, int64_t splits, int64_t t, int64_t g, int64_t j) {
  return pairwise_sum(splits, Real(0),
                      [&](int64_t s) { return static_cast<Real>(element(partial, s, t, g, j)); });
}

}  // namespace

template <class Real>
void reduce_partials_fwd_reference(const ReducePartialsForwardArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t j = 0; j < a.mixes; ++j) {
      Real mixed = 0;
      for (int64_t g = 0; g < a.groups; ++g) {
        const Real mul = sum_of_splits<Real>(a.mul_partial, a.splits, t, g, j);
        const Real sqr = sum_of_splits<Real>(a.sqr_partial, a.splits, t, g, 0);
        mixed = std::fma(mul, rms_factor(a.rms, sqr), mixed);
        if (a.mul.data != nullptr) element(a.mul, 0, t, g, j) = static_cast<float>(mul);
        if (a.sqr.data != nullptr) element(a.sqr, 0, t, g, 0) = static_cast<float>(sqr);
      }
      element(a.mixed, 0, t, 0, j) = static_cast<float>(mixed);
    }
  }
}

template <class Real>
void reduce_partials_bwd_reference(const ReducePartialsBackwardArgs& a, int64_t begin,
                                   int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t g = 0; g < a.groups; ++g) {
      const Real sqr = element(a.sqr, 0, t, g, 0);
      const Real factor = rms_factor(a.rms, sqr);
      Real grad_factor = 0;
      for (int64_t j = 0; j < a.mixes; ++j) {
        const Real grad = element(a.grad_mixed, 0, t, 0, j);
        grad_factor = std::fma(grad, static_cast<Real>(element(a.mul, 0, t, g, j)), grad_factor);
        element(a.grad_mul, 0, t, g, j) = static_cast<float>(grad * factor);
      }
      element(a.grad_sqr, 0, t, g, 0) =
          static_cast<float>(rms_gradient(a.rms, sqr, factor, grad_factor));
    }
  }
}

template void reduce_partials_fwd_reference<double>(const ReducePartialsForwardArgs&, int64_t,
                                                    int64_t);
template void reduce_partials_fwd_reference<float>(const ReducePartialsForwardArgs&, int64_t,
                                                   int64_t);
template void reduce_partials_bwd_reference<double>(const ReducePartialsBackwardArgs&, int64_t,
                                                    int64_t);
template void reduce_partials_bwd_reference<float>(const ReducePartialsBackwardArgs&, int64_t,
                                                   int64_t);

}  // namespace ehc::mhc
