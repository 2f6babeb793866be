// The formulas, scales and sums in double and in float; the momentum is fp32 in both.
#include <cmath>

#include "core/float_formats.h"
#include "ops/engram/momentum_update/momentum_update_math.h"
#include "ops/engram/optimizer_step/optimizer_step_math.h"
#include "ops/engram/sinkhorn/sinkhorn_math.h"

namespace ehc::engram {

namespace {

float load(const WeightRows& rows, int64_t r, int64_t j) {
  return load_float(rows.data, rows.type, r * rows.stride + j);
}

// The scaled update of one step, whose scales are `Real`.
template <class Real>
struct Matrix {
  const OptimizerStepArgs& args;
  Real* row_scale;  // [rows]
  Real* col_scale;  // [hd]

  [[nodiscard]] int64_t width() const { return args.matrix.x.width; }
  [[nodiscard]] Real eps() const { return args.matrix.x.eps; }
  [[nodiscard]] Real at(int64_t r, int64_t j) const {
    return row_scale[r] * Real(args.update[r * args.matrix.x.update_stride + j]) * col_scale[j];
  }
  [[nodiscard]] Real norm(int64_t r) const {
    Real squares = 0;
    for (int64_t j = 0; j < width(); ++j) squares += at(r, j) * at(r, j);
    return square_root(squares);
  }
};

void move_momentum(const OptimizerStepArgs& a) {
  GradientCursor gradient(a, 0);
  for (int64_t r = 0; r < a.rows; ++r) {
    const int64_t t = table_row(a, r);
    const int64_t u = gradient.at(r);
    for (int64_t j = 0; j < a.matrix.x.width; ++j) {
      const float grad = u < 0 ? 0.0F : load(a.grad, u, j);
      const Moved moved = move_element(a.factors, grad, load(a.momentum, t, j));
      a.update[r * a.matrix.x.update_stride + j] = moved.update;
      store_float(a.new_momentum.data, a.new_momentum.type, t * a.new_momentum.stride + j,
                  moved.momentum);
    }
  }
}

// Row scales 1 and 0. Returns whether all norms are finite.
template <class Real>
bool find_live_rows(const Matrix<Real>& x) {
  const OptimizerStepArgs& a = x.args;
  double total = 0;
  for (int64_t r = 0; r < a.rows; ++r) {
    x.row_scale[r] = 1;
    x.row_scale[r] = x.norm(r);
    total += static_cast<double>(x.row_scale[r]);
  }
  const double threshold = live_threshold(a, total);
  for (int64_t r = 0; r < a.rows; ++r) {
    x.row_scale[r] = static_cast<double>(x.row_scale[r]) > threshold ? 1 : 0;
  }
  return std::isfinite(total);
}

// A row step and a column step. `norms` [rows]: scratch.
template <class Real>
void balance(const Matrix<Real>& x, Real* norms) {
  const int64_t rows = x.args.rows;
  for (int64_t r = 0; r < rows; ++r) norms[r] = x.norm(r);
  for (int64_t r = 0; r < rows; ++r) {
    x.row_scale[r] = next_row_scale(x.row_scale[r], norms[r], x.eps());
  }
  for (int64_t j = 0; j < x.width(); ++j) {
    Real sum = 0;
    for (int64_t r = 0; r < rows; ++r) sum += x.at(r, j) * x.at(r, j);
    x.col_scale[j] = next_col_scale(x.col_scale[j], sum, x.eps());
  }
}

template <class Real>
void move_weights(const Matrix<Real>& x, bool skip_zero_scales) {
  const OptimizerStepArgs& a = x.args;
  for (int64_t r = 0; r < a.rows; ++r) {
    const bool skipped = skip_zero_scales && x.row_scale[r] == Real(0);
    const int64_t t = table_row(a, r);
    const Real factor = row_factor(Real(a.matrix.alpha), x.norm(r), x.eps());
    for (int64_t j = 0; j < x.width(); ++j) {
      const Real weight = load(a.weight, t, j);
      const Real moved = skipped ? weight : std::fma(-Real(a.rate), x.at(r, j) * factor, weight);
      store_float(a.new_weight.data, a.new_weight.type, t * a.new_weight.stride + j, moved);
    }
  }
}

}  // namespace

template <class Real>
void optimizer_step_reference(const OptimizerStepArgs& a, int64_t repeat, Real* row_scale,
                              Real* col_scale, Real* norms) {
  const Matrix<Real> x = {a, row_scale, col_scale};
  for (int64_t j = 0; j < x.width(); ++j) col_scale[j] = 1;
  move_momentum(a);
  const bool finite = find_live_rows(x);
  for (int64_t k = 0; k < repeat; ++k) balance(x, norms);
  move_weights(x, finite);
}

#define EHC_INSTANTIATE(Real) \
  template void optimizer_step_reference(const OptimizerStepArgs&, int64_t, Real*, Real*, Real*)
EHC_INSTANTIATE(double);
EHC_INSTANTIATE(float);
#undef EHC_INSTANTIATE

}  // namespace ehc::engram
