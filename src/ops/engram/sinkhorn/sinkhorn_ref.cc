// The formulas, in double and in float.
#include "ops/engram/sinkhorn/sinkhorn_args.h"
#include "ops/engram/sinkhorn/sinkhorn_math.h"

namespace ehc::engram {

namespace {

template <class Real>
Real element(const ScaledUpdate& x, int64_t r, int64_t j) {
  return Real(x.row_scale[r]) * Real(x.update[r * x.update_stride + j]) * Real(x.col_scale[j]);
}

template <class Real>
Real row_norm(const ScaledUpdate& x, int64_t r) {
  Real squares = 0;
  for (int64_t j = 0; j < x.width; ++j) {
    squares += element<Real>(x, r, j) * element<Real>(x, r, j);
  }
  return square_root(squares);
}

}  // namespace

template <class Real>
void sinkhorn_step_reference(const SinkhornStepArgs& a, Real* norms, int64_t chunk, int64_t begin,
                             int64_t end) {
  const Real eps = a.x.eps;
  for (int64_t r = begin; r < end; ++r) norms[r] = row_norm<Real>(a.x, r);
  for (int64_t j = 0; j < a.x.width; ++j) {
    Real sum = 0;
    for (int64_t r = begin; r < end; ++r) {
      const Real y = element<Real>(a.x, r, j) * row_factor(Real(1), norms[r], eps);
      sum += y * y;
    }
    a.col_partial[chunk * a.col_partial_stride + j] = static_cast<float>(sum);
  }
  for (int64_t r = begin; r < end; ++r) {
    a.row_norm[r] = static_cast<float>(norms[r]);
    a.new_row_scale[r] = static_cast<float>(next_row_scale(Real(a.x.row_scale[r]), norms[r], eps));
  }
}

template <class Real>
void sinkhorn_reduce_reference(const SinkhornReduceArgs& a, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; ++j) {
    Real sum = 0;
    for (int64_t p = 0; p < a.partials; ++p) sum += a.col_partial[p * a.col_partial_stride + j];
    a.col_sumsq[j] = static_cast<float>(sum);
    if (a.col_scale == nullptr) continue;
    a.new_col_scale[j] = static_cast<float>(next_col_scale(Real(a.col_scale[j]), sum, Real(a.eps)));
  }
}

template <class Real>
void sinkhorn_finalize_reference(const SinkhornFinalizeArgs& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const Real factor = row_factor(Real(a.alpha), row_norm<Real>(a.x, r), Real(a.x.eps));
    for (int64_t j = 0; j < a.x.width; ++j) {
      a.out[r * a.out_stride + j] = static_cast<float>(element<Real>(a.x, r, j) * factor);
    }
  }
}

#define EHC_INSTANTIATE(Real)                                                                 \
  template void sinkhorn_step_reference(const SinkhornStepArgs&, Real*, int64_t, int64_t,     \
                                        int64_t);                                             \
  template void sinkhorn_reduce_reference<Real>(const SinkhornReduceArgs&, int64_t, int64_t); \
  template void sinkhorn_finalize_reference<Real>(const SinkhornFinalizeArgs&, int64_t, int64_t)
EHC_INSTANTIATE(double);
EHC_INSTANTIATE(float);
#undef EHC_INSTANTIATE

}  // namespace ehc::engram
