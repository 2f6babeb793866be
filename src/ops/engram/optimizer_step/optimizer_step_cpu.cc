// engram.optimizer_step on SIMD lanes: the first and the last pass over the table. Those between
// are the kernels of sinkhorn_step and sinkhorn_step_reduce.
//
//   first: A, m' of momentum_update, v[r] = norm of A_r, sum over rows of (A_r / (v[r] + eps))^2
//   last:  W' = round(fma(-rate, x * (alpha / (norm of x_r + eps)), W)), x = scaled A
//   W, g, m W[rows,hd], A F32[rows,hd]
//
// Bytes an element: g + 2m + 4 and 4 + 2W. The first pass takes the sums of the first round as if
// all rows lived, so that A is read once less where they do. Same lanes and steps as the operators
// alone.
#include <cstring>

#include "ops/engram/momentum_update/momentum_update_simd.h"
#include "ops/engram/optimizer_step/optimizer_step_args.h"
#include "ops/engram/sinkhorn/sinkhorn_simd.h"

namespace ehc::engram::EHC_ISA {
namespace {

using Form = OptimizerStepArgs::Form;

template <class W>
EHC_SIMD W* row_of(const WeightRows& rows, int64_t r) {
  return static_cast<W*>(rows.data) + r * rows.stride;
}

// The rows that a list names are far apart in memory, where the processor does not foresee them.
template <class W>
EHC_SIMD void fetch_listed(const OptimizerStepArgs& a, const WeightRows& rows, int64_t r,
                           int64_t end) {
  constexpr int64_t kAhead = 8, kLine = 64 / sizeof(W), kLines = 16;
  if (a.form != Form::lazy || r + kAhead >= end) return;
  const W* row = row_of<W>(rows, row_at(a.touched, r + kAhead));
  for (int64_t j = 0; j < a.matrix.x.width && j < kLines * kLine; j += kLine) {
    simd::prefetch(row + j);
  }
}

template <bool kNesterov, class Grad, class Momentum>
inline double move_rows(const OptimizerStepArgs& a, int64_t begin, int64_t end, float* sums) {
  const int64_t width = a.matrix.x.width;
  GradientCursor gradient(a, begin);
  using Waiting = WaitingRows<NormalRow>;
  Waiting waiting;
  // Copies of the waiting rows and the one in the making: the update itself may go past the caches.
  alignas(64) float recent[(Waiting::kRows + 1) * kMostSummedWidth];
  const auto add_columns = [&](const NormalRow& row, int64_t j, int64_t count) EHC_SIMD_LAMBDA {
    add_squares(mul(simd::load_some(row.update + j, count), simd::splat(row.scale)), sums + j,
                count);
  };
  double norms = 0;
  for (int64_t r = begin; r < end; ++r) {
    fetch_listed<Momentum>(a, a.momentum, r, end);
    const int64_t t = table_row(a, r), u = gradient.at(r);
    float* update = a.update + r * a.matrix.x.update_stride;
    float* copy = sums ? recent + waiting.found() % (Waiting::kRows + 1) * width : nullptr;
    const MomentumRow<Grad, Momentum> row = {
        u < 0 ? reinterpret_cast<const Grad*>(a.zeros) : row_of<Grad>(a.grad, u),
        row_of<Momentum>(a.momentum, t), row_of<Momentum>(a.new_momentum, t), update};
    Pair sum = simd::zero_pair();
    const auto keep = [&](int64_t j, Pair x, int64_t count) EHC_SIMD_LAMBDA {
      if (count < kPair) x = first_elements(x, count);
      sum = fma(x, x, sum);
      if (copy) simd::store_some(copy + j, x, count, false);
    };
    if (waiting.is_full()) {
      const NormalRow earlier = waiting.take();
      move_row<kNesterov>(a.factors, row, width, a.streaming,
                          [&](int64_t j, Pair x, int64_t count) EHC_SIMD_LAMBDA {
                            keep(j, x, count);
                            add_columns(earlier, j, count);
                          });
    } else {
      move_row<kNesterov>(a.factors, row, width, a.streaming, keep);
    }
    const float norm = norm_of(simd::reduce_add(sum), [&](float unit) EHC_SIMD_LAMBDA {
      return row_squares_in_unit({update, false, 1.0f}, a.col_scale, width, unit);
    });
    a.row_scale[r] = norm;
    norms += static_cast<double>(norm);
    if (sums && norm != 0.0f) waiting.add({copy, next_row_scale(1.0f, norm, a.matrix.x.eps)});
  }
  finish_work(width, waiting, add_columns);
  if (a.streaming) simd::stream_fence();
  return norms;
}

template <class W>
struct WeightRow {
  const float* update;
  const W* weight;
  W* new_weight;
  float scale;
  float factor;
  bool streaming;
};

template <class W>
inline void move_weights(const OptimizerStepArgs& a, int64_t begin, int64_t end) {
  const ScaledUpdate& x = a.matrix.x;
  const bool in_place = a.weight.data == a.new_weight.data;
  const Vec rate = simd::splat(-a.rate);
  const bool dense = is_dense(x);
  const auto move = [&](const WeightRow<W>& row, int64_t j, int64_t count) EHC_SIMD_LAMBDA {
    const Pair change =
        mul(scaled_pair(row.update + j, simd::splat(row.scale), x.col_scale + j, count),
            simd::splat(row.factor));
    const Pair moved = fma(rate, change, load_natural(row.weight + j, count));
    store_natural(row.new_weight + j, moved, count, row.streaming);
  };
  WaitingRows<WeightRow<W>> waiting;
  for (int64_t r = begin; r < end; ++r) {
    fetch_listed<W>(a, a.weight, r, end);
    const int64_t t = table_row(a, r);
    const W* weight = row_of<W>(a.weight, t);
    W* new_weight = row_of<W>(a.new_weight, t);
    const float scale = x.row_scale[r];
    if (scale == 0.0f && a.skip_zero_scales) {
      if (!in_place) std::memcpy(new_weight, weight, static_cast<size_t>(x.width) * sizeof(W));
      continue;
    }
    const float* update = x.update + r * x.update_stride;
    const float norm = norm_and_work({update, dense, scale}, x.col_scale, x.width, waiting, move);
    const bool streaming = a.streaming && !in_place && simd::can_stream(new_weight);
    waiting.add(
        {update, weight, new_weight, scale, row_factor(a.matrix.alpha, norm, x.eps), streaming});
  }
  finish_work(x.width, waiting, move);
  if (a.streaming) simd::stream_fence();
}

}  // namespace

double optimizer_momentum_rows(const OptimizerStepArgs& args, int64_t begin, int64_t end,
                               float* sums) {
  if (sums) std::memset(sums, 0, static_cast<size_t>(args.matrix.x.width) * sizeof(float));
  double norms = 0;
  with_weight(args.grad.type, [&](auto grad) {
    with_weight(args.momentum.type, [&](auto momentum) {
      using Grad = decltype(grad);
      using Momentum = decltype(momentum);
      norms = args.factors.nesterov ? move_rows<true, Grad, Momentum>(args, begin, end, sums)
                                    : move_rows<false, Grad, Momentum>(args, begin, end, sums);
    });
  });
  return norms;
}

void optimizer_weight_rows(const OptimizerStepArgs& args, int64_t begin, int64_t end) {
  with_weight(args.weight.type,
              [&](auto weight) { move_weights<decltype(weight)>(args, begin, end); });
}

}  // namespace ehc::engram::EHC_ISA
