// mhc.split_fwd, mhc.split_bwd and mhc.split_bwd_reduce in plain loops, in double and in float.
#include "ops/mhc/shared/stream_reference.h"
#include "ops/mhc/split/split_args.h"
#include "ops/mhc/split/split_math.h"

namespace ehc::mhc {

namespace {

// The segment of mix j: pre, post, comb.
int64_t segment_of(int64_t j, int64_t streams) { return j < 2 * streams ? j / streams : 2; }

template <class Real, class Args>
Real logit_of(const Args& a, int64_t t, int64_t j) {
  return mix_logit<Real>(load(a.mixes, t, 0, j), a.scale[segment_of(j, a.streams)], a.base[j]);
}

template <class Real>
Real logit_gradient(const SplitBackwardArgs& a, int64_t t, int64_t j) {
  const int64_t n = a.streams;
  const auto u = logit_of<Real>(a, t, j);
  if (j < n) return mix_gate_gradient<Real>(u, 1, load(a.grad_pre, t, 0, j));
  if (j < 2 * n) return mix_gate_gradient<Real>(u, a.post_mult, load(a.grad_post, t, 0, j - n));
  return load(a.grad_comb_logits, t, (j - 2 * n) / n, j % n);
}

}  // namespace

template <class Real>
void split_fwd_reference(const SplitForwardArgs& a, int64_t begin, int64_t end) {
  const int64_t n = a.streams;
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t j = 0; j < n; ++j) {
      store(a.pre, t, 0, j, mix_gate<Real>(logit_of<Real>(a, t, j), 1, a.pre_eps));
      store(a.post, t, 0, j, mix_gate<Real>(logit_of<Real>(a, t, n + j), a.post_mult, 0));
    }
    for (int64_t j = 0; j < n * n; ++j) {
      store(a.comb_logits, t, j / n, j % n, logit_of<Real>(a, t, 2 * n + j));
    }
  }
}

template <class Real>
void split_bwd_reference(const SplitBackwardArgs& a, const SplitPartial& partial, int64_t begin,
                         int64_t end) {
  const int64_t n = a.streams;
  Real of_scale[3] = {};
  for (int64_t j = 0; j < n * n + 2 * n; ++j) {
    const int64_t segment = segment_of(j, n);
    Real of_base = 0;
    for (int64_t t = begin; t < end; ++t) {
      const auto grad = logit_gradient<Real>(a, t, j);
      of_base += grad;
      of_scale[segment] =
          std::fma(grad, static_cast<Real>(load(a.mixes, t, 0, j)), of_scale[segment]);
      store(a.grad_mixes, t, 0, j, grad * static_cast<Real>(a.scale[segment]));
    }
    partial.base[j] = static_cast<float>(of_base);
  }
  for (int i = 0; i < 3; ++i) partial.scale[i] = static_cast<float>(of_scale[i]);
}

template <class Real>
void add_partials_reference(const PartialSum& s) {
  for (int64_t j = 0; j < s.width; ++j) {
    Real sum = 0;
    for (int64_t p = 0; p < s.partials; ++p) sum += s.partial[p * s.partial_stride + j];
    const Real before = s.accumulated != nullptr ? s.accumulated[j] : 0.0F;
    s.sum[j] = static_cast<float>(before + sum);
  }
}

template void split_fwd_reference<double>(const SplitForwardArgs&, int64_t, int64_t);
template void split_fwd_reference<float>(const SplitForwardArgs&, int64_t, int64_t);
template void split_bwd_reference<double>(const SplitBackwardArgs&, const SplitPartial&, int64_t,
                                          int64_t);
template void split_bwd_reference<float>(const SplitBackwardArgs&, const SplitPartial&, int64_t,
                                         int64_t);
template void add_partials_reference<double>(const PartialSum&);
template void add_partials_reference<float>(const PartialSum&);

}  // namespace ehc::mhc
