// mhc.norm_fn_bwd in plain loops, in double and in float.
#include <algorithm>
#include <cmath>

#include "ops/mhc/norm_fn_bwd/norm_fn_bwd_args.h"
#include "ops/mhc/shared/stream_reference.h"

namespace ehc::mhc {

namespace {

float element(const GroupRows& rows, int64_t token, int64_t group, int64_t j) {
  return rows.data[token * rows.token_stride + group * rows.group_stride + j];
}

// What the gradient of stream `i` is added to.
template <class Real>
Real target(const NormFnBackwardArgs& a, int64_t t, int64_t i, int64_t c) {
  Real sum = 0;
  if (a.grad_residual_acc.data != nullptr) {
    sum = load(a.sizes, a.grad_residual_acc, t, i * a.targets, c);
    for (int64_t k = 1; k < a.targets; ++k) {
      sum += load(a.sizes, a.grad_residual_acc, t, i * a.targets + k, c);
    }
  }
  if (a.grad_row.rows.data == nullptr) return sum;
  const Real row = load(a.sizes, a.grad_row, t, 0, c);
  sum = std::fma(static_cast<Real>(load(a.row_factor, t, 0, i)), row, sum);
  if (!a.rounds_target) return sum;
  float rounded = 0;  // room for any A
  store_float(&rounded, a.sizes.activation, 0, sum);
  return load_float(&rounded, a.sizes.activation, 0);
}

}  // namespace

template <class Real>
void norm_fn_bwd_reference(const NormFnBackwardArgs& a, const Tile& tile, float* /*scratch*/) {
  const int64_t d = a.sizes.hidden;
  const int64_t width = a.sizes.streams * d / a.groups;
  const bool of_streams = a.grad_residual.rows.data != nullptr;
  const bool of_fn = a.grad_fn.data != nullptr;
  for (int64_t k = tile.column_begin; k < tile.column_end; ++k) {
    const int64_t g = k / width;
    const auto x = [&](int64_t t) -> Real { return load(a.sizes, a.residual, t, k / d, k % d); };
    for (int64_t t = tile.token_begin; of_streams && t < tile.token_end; ++t) {
      Real sum = 0;
      for (int64_t j = 0; j < a.mixes; ++j) {
        const float fn = a.fn.data[j * a.fn.stride + k];
        sum = std::fma(static_cast<Real>(element(a.grad_mul, t, g, j)),
                       static_cast<Real>(a.tf32 ? round_to_tf32(fn) : fn), sum);
      }
      sum = std::fma(static_cast<Real>(2) * static_cast<Real>(element(a.grad_sqr, t, g, 0)), x(t),
                     sum);
      const Real before = target<Real>(a, t, k / d, k % d);
      store(a.sizes, a.grad_residual, t, k / d, k % d, before + sum);
    }
    for (int64_t j = 0; of_fn && j < a.mixes; ++j) {
      Real total = 0;
      for (int64_t first = 0; first < a.sizes.tokens; first += kNormFnTokens) {
        const int64_t last = std::min(a.sizes.tokens, first + kNormFnTokens);
        Real sum = 0;
        for (int64_t t = first; t < last; ++t) {
          sum = std::fma(static_cast<Real>(element(a.grad_mul, t, g, j)), x(t), sum);
        }
        total += sum;
      }
      const Real before =
          a.grad_fn_acc.data != nullptr ? a.grad_fn_acc.data[j * a.grad_fn_acc.stride + k] : 0.0F;
      a.grad_fn.data[j * a.grad_fn.stride + k] = static_cast<float>(before + total);
    }
  }
}

template void norm_fn_bwd_reference<double>(const NormFnBackwardArgs&, const Tile&, float*);
template void norm_fn_bwd_reference<float>(const NormFnBackwardArgs&, const Tile&, float*);

}  // namespace ehc::mhc
