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

EHC_SIMD void gate_sum_step(GateSums& sums, simd::Pair x, simd::Pair k, simd::Pair weight) {
  sums.residual_squares = fma(x, x, sums.residual_squares);
  sums.key_squares = fma(k, k, sums.key_squares);
  sums.dot = fma(mul(x, weight), k, sums.dot);
}

// One row of x, k and wf; the next to be worked on.
template <class A>
struct GateRow {
  const A* residual;
  const A* key;
  const float* weight;
};

// Adds columns [begin, end); begin is a multiple of kPair.
template <class A>
EHC_SIMD void gate_sum_columns(GateSums& sums, const GateRow<A>& row, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + simd::kPair <= end; i += simd::kPair) {
    gate_sum_step(sums, simd::load(row.residual + i), simd::load(row.key + i),
                  simd::load_f32<A>(row.weight + i));
  }
  if (const int rest = static_cast<int>(end - i); rest > 0) {
    gate_sum_step(sums, simd::load_tail(row.residual + i, rest), simd::load_tail(row.key + i, rest),
                  simd::load_f32_tail<A>(row.weight + i, rest));
  }
}

EHC_SIMD GateScalars gate_scalars(const GateSums& sums, int64_t hidden, float eps, float clamp) {
  GateScalars scalars;
  scalars.dot = reduce_add(sums.dot);
  scalars.rstd_residual = reciprocal_rms(reduce_add(sums.residual_squares), hidden, eps);
  scalars.rstd_key = reciprocal_rms(reduce_add(sums.key_squares), hidden, eps);
  const float logit =
      gate_logit(scalars.dot, scalars.rstd_residual, scalars.rstd_key, gate_scale<float>(hidden));
  scalars.alpha = simd::sigmoid(gate_signed_root(logit, clamp));
  return scalars;
}

// mean(v^2)
template <class A>
EHC_SIMD float mean_square(const A* row, int64_t hidden) {
  simd::Pair sum = simd::zero_pair();
  int64_t i = 0;
  for (; i + simd::kPair <= hidden; i += simd::kPair) {
    const simd::Pair v = simd::load(row + i);
    sum = fma(v, v, sum);
  }
  if (const int rest = static_cast<int>(hidden - i); rest > 0) {
    const simd::Pair v = simd::load_tail(row + i, rest);
    sum = fma(v, v, sum);
  }
  return reduce_add(sum) / static_cast<float>(hidden);
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
