// mhc.sinkhorn_fwd and mhc.sinkhorn_bwd in plain loops, in double and in float.
#include <algorithm>

#include "ops/mhc/shared/stream_reference.h"
#include "ops/mhc/sinkhorn/sinkhorn_math.h"

namespace ehc::mhc {

namespace {

template <class Real>
struct TrueDivision {
  auto operator()(Real divisor) const {
    return [divisor](Real x) { return x / divisor; };
  }
};

template <class Real>
SinkhornConstants<Real> constants_of(const SinkhornRule& rule) {
  return {0, 1, rule.eps};
}

// `divisors` [repeat, 2, n], or null.
template <class Real>
void iterate(const SinkhornRule& rule, Real* y, Real* divisors) {
  const SinkhornConstants<Real> constants = constants_of<Real>(rule);
  sinkhorn_iterate<0>(
      rule, constants, TrueDivision<Real>{},
      [&](Real* iterate, Real* of_round) {
        for (int64_t round = 0; round < whole_rounds(rule); ++round) {
          sinkhorn_round<0>(rule, constants, TrueDivision<Real>{}, iterate, of_round);
          if (of_round != nullptr) of_round += 2 * rule.streams;
        }
      },
      y, divisors);
}

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
  const int64_t n = a.rule.streams;
  for (int64_t t = begin; t < end; ++t) {
    Real logits[kMaxMatrix];
    Real y[kMaxMatrix];
    load_matrix(a.logits, t, n, logits);
    if (a.rule.form == SinkhornForm::log) {
      Real potentials[(2 * kMaxRepeat + 1) * kMaxStreams];
      sinkhorn_log_iterate_all<0>(a.rule, constants_of<Real>(a.rule), logits, potentials);
      const Real* of_columns = potentials + 2 * a.rule.repeat * n;
      sinkhorn_log_iterate<0>(a.rule, logits, of_columns - n, of_columns, y);
    } else {
      sinkhorn_start<0>(a.rule, logits, y);
      iterate<Real>(a.rule, y, nullptr);
    }
    store_matrix(y, t, n, a.comb);
  }
}

template <class Real>
void sinkhorn_bwd_reference(const SinkhornBackwardArgs& a, int64_t begin, int64_t end) {
  const int64_t n = a.rule.streams;
  for (int64_t t = begin; t < end; ++t) {
    Real logits[kMaxMatrix];
    Real grad[kMaxMatrix];
    Real y[kMaxMatrix];
    load_matrix(a.logits, t, n, logits);
    load_matrix(a.grad_comb, t, n, grad);
    if (a.rule.form == SinkhornForm::log) {
      Real potentials[(2 * kMaxRepeat + 1) * kMaxStreams];
      sinkhorn_log_iterate_all<0>(a.rule, constants_of<Real>(a.rule), logits, potentials);
      sinkhorn_log_back<0>(a.rule, logits, potentials, y, grad);
    } else {
      Real start[kMaxMatrix];
      Real divisors[2 * kMaxRepeat * kMaxStreams];
      sinkhorn_start<0>(a.rule, logits, start);
      std::copy_n(start, n * n, y);
      iterate<Real>(a.rule, y, divisors);
      sinkhorn_iterate_back<0>(a.rule, constants_of<Real>(a.rule), divisors, start, y, grad);
    }
    store_matrix(grad, t, n, a.grad_logits);
  }
}

template void sinkhorn_fwd_reference<double>(const SinkhornForwardArgs&, int64_t, int64_t);
template void sinkhorn_fwd_reference<float>(const SinkhornForwardArgs&, int64_t, int64_t);
template void sinkhorn_bwd_reference<double>(const SinkhornBackwardArgs&, int64_t, int64_t);
template void sinkhorn_bwd_reference<float>(const SinkhornBackwardArgs&, int64_t, int64_t);

}  // namespace ehc::mhc
