// mhc.sinkhorn_fwd and mhc.sinkhorn_bwd in plain loops, in double and in float.
#include "ops/mhc/shared/stream_reference.h"
#include "ops/mhc/sinkhorn/sinkhorn_math.h"

namespace ehc::mhc {

namespace {

template <class Real>
void load_matrix(const Coefficients& from, int64_t token, int64_t n, Real* to) {
  for (int64_t e = 0; e < n * n; ++e) to[e] = load(from, token, e / n, e % n);
}

template <class Real>
void store_matrix(const Real* from, int64_t token, int64_t n, const Coefficients& to) {
  for (int64_t e = 0; e < n * n; ++e) store(to, token, e / n, e % n, from[e]);
}

}  // namespace

template <class Real>
void sinkhorn_fwd_reference(const SinkhornForwardArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    Real logits[kMaxMatrix];
    Real y[kMaxMatrix];
    load_matrix(a.logits, t, a.rule.streams, logits);
    sinkhorn_matrix<0>(a.rule, PlainRounds<0, Real>{a.rule}, logits, y);
    store_matrix(y, t, a.rule.streams, a.comb);
  }
}

template <class Real>
void sinkhorn_bwd_reference(const SinkhornBackwardArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    Real logits[kMaxMatrix];
    Real grad[kMaxMatrix];
    Real trace[kSinkhornTrace<0, kMaxRepeat>];
    load_matrix(a.logits, t, a.rule.streams, logits);
    load_matrix(a.grad_comb, t, a.rule.streams, grad);
    sinkhorn_matrix_back<0>(a.rule, PlainRounds<0, Real>{a.rule}, logits, trace, grad);
    store_matrix(grad, t, a.rule.streams, a.grad_logits);
  }
}

template void sinkhorn_fwd_reference<double>(const SinkhornForwardArgs&, int64_t, int64_t);
template void sinkhorn_fwd_reference<float>(const SinkhornForwardArgs&, int64_t, int64_t);
template void sinkhorn_bwd_reference<double>(const SinkhornBackwardArgs&, int64_t, int64_t);
template void sinkhorn_bwd_reference<float>(const SinkhornBackwardArgs&, int64_t, int64_t);

}  // namespace ehc::mhc
