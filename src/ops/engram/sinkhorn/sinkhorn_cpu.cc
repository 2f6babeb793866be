// engram.sinkhorn_step, sinkhorn_step_reduce, sinkhorn_finalize on SIMD lanes.
//
//   x[r,j] = (row_scale[r] * A[r,j]) * col_scale[j], v = sqrt(sum over j of x^2)
//   step: row_scale[r] /= v + eps, partial[p,j] = sum over rows of chunk p of x^2 with that scale
//   reduce: sumsq[j] = sum over p of partial[p,j], col_scale[j] /= sqrt(sumsq[j]) + eps
//   finalize: out[r,j] = x * (alpha / (v + eps))
//   A, out F32[rows,hd], partial F32[P,hd]
//
// Bytes: A once, and out.
// Algorithm: one loop over j takes the norm of a row and works on the fourth row before it, which
// the first-level cache still has. Class R per implementation: lanes depend on the column alone,
// columns are summed in row order.
#include <cstring>

#include "ops/engram/sinkhorn/sinkhorn_simd.h"

namespace ehc::engram::EHC_ISA {

namespace {

struct OutRow {
  const float* update;
  float* out;
  float scale;
  float factor;
  bool streaming;
};

}  // namespace

void sinkhorn_step_chunk(const SinkhornStepArgs& a, int64_t chunk, int64_t begin, int64_t end) {
  const ScaledUpdate& x = a.x;
  const bool dense = is_dense(x);
  float* sums = a.col_partial + chunk * a.col_partial_stride;
  std::memset(sums, 0, static_cast<size_t>(x.width) * sizeof(float));
  const auto add_columns = [&](const NormalRow& row, int64_t j, int64_t count) EHC_SIMD_LAMBDA {
    const Pair y = mul(simd::load_some(row.update + j, count), simd::splat(row.scale));
    add_squares(mul(y, simd::load_some(x.col_scale + j, count)), sums + j, count);
  };
  WaitingRows<NormalRow> waiting;
  for (int64_t r = begin; r < end; ++r) {
    const float scale = x.row_scale[r];
    if (scale == 0.0f && a.skip_zero_scales) {
      a.new_row_scale[r] = 0.0f;
      continue;
    }
    const float* update = x.update + r * x.update_stride;
    const float norm =
        norm_and_work({update, dense, scale}, x.col_scale, x.width, waiting, add_columns);
    const float new_scale = next_row_scale(scale, norm, x.eps);
    if (a.row_norm) a.row_norm[r] = norm;
    a.new_row_scale[r] = new_scale;
    if (norm != 0.0f) waiting.add({update, new_scale});
  }
  finish_work(x.width, waiting, add_columns);
}

void sinkhorn_reduce_columns(const SinkhornReduceArgs& a, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; j += kPair) {
    const int64_t count = end - j;
    Pair sum = simd::zero_pair();
    for (int64_t p = 0; p < a.partials; ++p) {
      sum = add(sum, simd::load_some(a.col_partial + p * a.col_partial_stride + j, count));
    }
    if (a.col_sumsq) simd::store_some(a.col_sumsq + j, sum, count, false);
    if (!a.col_scale) continue;
    float squares[kPair];
    simd::store(squares, sum);
    for (int64_t k = 0; k < kPair && k < count; ++k) {
      a.new_col_scale[j + k] = next_col_scale(a.col_scale[j + k], squares[k], a.eps);
    }
  }
}

void sinkhorn_finalize_rows(const SinkhornFinalizeArgs& a, int64_t begin, int64_t end) {
  const ScaledUpdate& x = a.x;
  const bool dense = is_dense(x);
  const auto write = [&](const OutRow& row, int64_t j, int64_t count) EHC_SIMD_LAMBDA {
    const Pair y = mul(scaled_pair(row.update + j, simd::splat(row.scale), x.col_scale + j, count),
                       simd::splat(row.factor));
    simd::store_some(row.out + j, y, count, row.streaming);
  };
  WaitingRows<OutRow> waiting;
  for (int64_t r = begin; r < end; ++r) {
    const float* update = x.update + r * x.update_stride;
    const float scale = x.row_scale[r];
    const float norm = norm_and_work({update, dense, scale}, x.col_scale, x.width, waiting, write);
    float* out = a.out + r * a.out_stride;
    const bool streaming = a.streaming && out != update && simd::can_stream(out);
    waiting.add({update, out, scale, row_factor(a.alpha, norm, x.eps), streaming});
  }
  finish_work(x.width, waiting, write);
  if (a.streaming) simd::stream_fence();
}

}  // namespace ehc::engram::EHC_ISA
