// mhc.pre_apply_fwd and mhc.pre_apply_bwd in plain loops, in double and in float.
#include "ops/mhc/pre_apply/pre_apply_args.h"
#include "ops/mhc/pre_apply/pre_apply_math.h"
#include "ops/mhc/shared/stream_reference.h"

namespace ehc::mhc {

template <class Real>
void pre_apply_fwd_reference(const PreApplyForwardArgs& a, const Tile& tile) {
  for (int64_t t = tile.token_begin; t < tile.token_end; ++t) {
    for (int64_t c = tile.column_begin; c < tile.column_end; ++c) {
      const Real o =
          pre_apply_column<Real>([&](int64_t i) { return load(a.pre, t, 0, i); }, a.sizes.streams,
                                 [&](int64_t i) { return load(a.sizes, a.residual, t, i, c); });
      store(a.sizes, a.layer_input, t, 0, c, o);
    }
  }
}

template <class Real>
void pre_apply_bwd_reference(const PreApplyBackwardArgs& a, int64_t begin, int64_t end) {
  const bool adds = a.grad_residual_acc.data != nullptr;
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t i = 0; i < a.sizes.streams; ++i) {
      const Real pre = load(a.pre, t, 0, i);
      Real grad_pre = 0;
      for (int64_t c = 0; c < a.sizes.hidden; ++c) {
        const Real grad = load(a.sizes, a.grad_layer_input, t, 0, c);
        const Real target = adds ? load(a.sizes, a.grad_residual_acc, t, i, c) : 0;
        grad_pre = std::fma(grad, static_cast<Real>(load(a.sizes, a.residual, t, i, c)), grad_pre);
        store(a.sizes, a.grad_residual, t, i, c, std::fma(pre, grad, target));
      }
      store(a.grad_pre, t, 0, i, grad_pre);
    }
  }
}

template void pre_apply_fwd_reference<double>(const PreApplyForwardArgs&, const Tile&);
template void pre_apply_fwd_reference<float>(const PreApplyForwardArgs&, const Tile&);
template void pre_apply_bwd_reference<double>(const PreApplyBackwardArgs&, int64_t, int64_t);
template void pre_apply_bwd_reference<float>(const PreApplyBackwardArgs&, int64_t, int64_t);

}  // namespace ehc::mhc
