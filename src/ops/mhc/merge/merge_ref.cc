// mhc.merge_fwd and mhc.merge_bwd in plain loops, in double and in float.
#include <cmath>

#include "ops/mhc/merge/merge_args.h"

namespace ehc::mhc {

template <class Real>
void merge_fwd_reference(const MergeForwardArgs& a, int64_t begin, int64_t end) {
  for (int64_t j = 0; j < a.mixes; ++j) {
    for (int64_t k = begin; k < end; ++k) {
      const Real fn = a.fn.data[j * a.fn.stride + k];
      a.merged.data[j * a.merged.stride + k] = static_cast<float>(fn * a.norm_weight[k]);
    }
  }
}

template <class Real>
void merge_bwd_reference(const MergeBackwardArgs& a, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    Real sum = 0;
    for (int64_t j = 0; j < a.mixes; ++j) {
      const Real grad = a.grad_merged.data[j * a.grad_merged.stride + k];
      const Real before =
          a.grad_fn_acc.data != nullptr ? a.grad_fn_acc.data[j * a.grad_fn_acc.stride + k] : 0.0F;
      sum = std::fma(grad, static_cast<Real>(a.fn.data[j * a.fn.stride + k]), sum);
      a.grad_fn.data[j * a.grad_fn.stride + k] =
          static_cast<float>(std::fma(grad, static_cast<Real>(a.norm_weight[k]), before));
    }
    const Real before = a.grad_weight_acc != nullptr ? a.grad_weight_acc[k] : 0.0F;
    a.grad_weight[k] = static_cast<float>(before + sum);
  }
}

template void merge_fwd_reference<double>(const MergeForwardArgs&, int64_t, int64_t);
template void merge_fwd_reference<float>(const MergeForwardArgs&, int64_t, int64_t);
template void merge_bwd_reference<double>(const MergeBackwardArgs&, int64_t, int64_t);
template void merge_bwd_reference<float>(const MergeBackwardArgs&, int64_t, int64_t);

}  // namespace ehc::mhc
