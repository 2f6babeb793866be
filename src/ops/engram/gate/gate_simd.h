// Vector steps of the gate, shared by the gate and the whole layer so that both give the same bits.
#pragma once

#include "backends/cpu/simd.h"
#include "ops/engram/gate/gate_args.h"
#include "ops/engram/gate/gate_math.h"

namespace ehc::engram::EHC_ISA {
namespace {

namespace simd = ehc::simd::EHC_ISA;

// Running sums over a row: x^2, k^2 and (x * wf) * k.
struct GateSums {
  simd::Pair residual_squares = simd::zero_pair(), key_squares = simd::zero_pair(),
             dot = simd::zero_pair();
};

struct GateScalars {
  float dot, alpha, rstd_residual, rstd_key;
};

// One row of x, k and wf; the next to be worked on.
template <class A>
struct GateRow {
  const A* residual;
  const A* key;
  const float* weight;
};

// Adds up to a pair of columns.
template <class A>
EHC_SIMD void gate_sum_pair(GateSums& sums, const GateRow<A>& row, int64_t column, int64_t count) {
  const A *x = row.residual + column, *k = row.key + column;
  sums.residual_squares = simd::add_squares(sums.residual_squares, x, count);
  sums.key_squares = simd::add_squares(sums.key_squares, k, count);
  sums.dot = fma(mul(simd::load_some(x, count), simd::load_f32_some<A>(row.weight + column, count)),
                 simd::load_some(k, count), sums.dot);
}

template <class A>
EHC_SIMD GateSums gate_sum_row(const GateRow<A>& row, int64_t hidden) {
  GateSums sums;
  for (int64_t i = 0; i < hidden; i += simd::kPair) gate_sum_pair(sums, row, i, hidden - i);
  return sums;
}

template <class A>
EHC_SIMD GateScalars gate_scalars(const GateSums& sums, const GateRow<A>& row, int64_t hidden,
                                  float eps, float clamp) {
  GateScalars scalars;
  scalars.dot = reduce_add(sums.dot);
  scalars.rstd_residual =
      reciprocal_rms(simd::square_sum(sums.residual_squares, row.residual, hidden), hidden, eps);
  scalars.rstd_key =
      reciprocal_rms(simd::square_sum(sums.key_squares, row.key, hidden), hidden, eps);
  const float logit =
      gate_logit(scalars.dot, scalars.rstd_residual, scalars.rstd_key, gate_scale<float>(hidden));
  scalars.alpha = simd::sigmoid(gate_signed_root(logit, clamp));
  return scalars;
}

// mean(v^2)
template <class A>
EHC_SIMD float mean_square(const A* row, int64_t hidden) {
  return simd::square_sum(row, hidden) / static_cast<float>(hidden);
}

EHC_SIMD void save(const StreamStatistic& to, int64_t token, int64_t stream, float x) {
  if (to.data) to.data[token * to.token_stride + stream] = x;
}

EHC_SIMD void save(const GateForwardArgs& args, int64_t token, int64_t stream,
                   const GateScalars& scalars) {
  save(args.dot, token, stream, scalars.dot);
  save(args.alpha, token, stream, scalars.alpha);
  save(args.rstd_residual, token, stream, scalars.rstd_residual);
  save(args.rstd_key, token, stream, scalars.rstd_key);
}

EHC_SIMD bool masked(const uint8_t* mask, int64_t token) { return mask && mask[token]; }

template <class A>
EHC_SIMD const A* residual_row(const GateForwardArgs& args, int64_t token, int64_t stream) {
  return static_cast<const A*>(args.residual) + token * args.residual_token_stride +
         stream * args.residual_stream_stride;
}

template <class A>
EHC_SIMD const A* key_row(const GateForwardArgs& args, int64_t token, int64_t stream) {
  return static_cast<const A*>(args.key) + token * args.key_token_stride +
         stream * args.key_stream_stride;
}

template <class A>
EHC_SIMD GateRow<A> gate_row(const GateForwardArgs& args, int64_t token, int64_t stream) {
  return {residual_row<A>(args, token, stream), key_row<A>(args, token, stream),
          args.weight_fused + stream * args.weight_stream_stride};
}

template <class A>
EHC_SIMD const A* value_row(const GateForwardArgs& args, int64_t token) {
  return static_cast<const A*>(args.value) + token * args.value_token_stride;
}

template <class A>
EHC_SIMD A* out_row(const GateForwardArgs& args, int64_t token, int64_t stream) {
  return static_cast<A*>(args.out) + token * args.out_token_stride +
         stream * args.out_stream_stride;
}

// An image token: kv is not read, statistics are zero.
template <class A>
inline void gate_masked_token(const GateForwardArgs& args, int64_t token) {
  const size_t row_bytes = static_cast<size_t>(args.hidden) * sizeof(A);
  for (int64_t h = 0; h < args.streams; ++h) {
    save(args, token, h, GateScalars{});
    if (args.mode == GateMode::stats) continue;
    A* out = out_row<A>(args, token, h);
    const A* residual = residual_row<A>(args, token, h);
    if (args.mode == GateMode::value) {
      std::memset(out, 0, row_bytes);
    } else if (out != residual) {
      std::memcpy(out, residual, row_bytes);
    }
  }
  if (args.value_mean_square) args.value_mean_square[token] = 0.0f;
}

}  // namespace
}  // namespace ehc::engram::EHC_ISA
