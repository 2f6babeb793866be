// Vector steps of the gate's backward pass for one token and stream, shared by the gate and the
// whole layer so that both give the same bits. The gradient of the residual path and that of the
// value path are vectors: where they come from is the caller's business.
//
//   1. grad_alpha = reduce_add(sum of add_grad_alpha), grad_value = sum of add_grad_value over h
//   2. GateSlopes from grad_alpha and the forward's scalars
//   3. gate_gradient for every pair of columns
#pragma once

#include "ops/engram/gate/gate_simd.h"
#include "ops/engram/gate_bwd/gate_bwd_args.h"
#include "ops/engram/gate_bwd/gate_bwd_math.h"

namespace ehc::engram::EHC_ISA {
namespace {

template <class A>
EHC_SIMD A* gradient_row(const GradientRows& rows, int64_t token, int64_t stream) {
  return static_cast<A*>(rows.data) + token * rows.token_stride + stream * rows.stream_stride;
}

template <class A>
EHC_SIMD bool can_stream(const GradientRows& rows) {
  return simd::rows_can_stream<A>(rows.data, rows.token_stride, rows.stream_stride);
}

template <class A>
inline void write_image_token(const GateBackwardArgs& args, int64_t token) {
  const auto bytes = static_cast<size_t>(args.gate.hidden) * sizeof(A);
  for (int64_t h = 0; h < args.gate.streams; ++h) {
    std::memcpy(gradient_row<A>(args.grad_residual, token, h),
                gradient_row<A>(args.grad_out, token, h), bytes);
    std::memset(gradient_row<A>(args.grad_key, token, h), 0, bytes);
  }
  std::memset(gradient_row<A>(args.grad_value, token, 0), 0, bytes);
}

// sum + grad * value, for grad_alpha; starts from zero_pair().
EHC_SIMD simd::Pair add_grad_alpha(simd::Pair sum, simd::Pair grad, simd::Pair value) {
  return fma(grad, value, sum);
}

// sum + alpha * grad, for grad_value; streams in ascending order from zero_pair().
EHC_SIMD simd::Pair add_grad_value(simd::Pair sum, float alpha, simd::Pair grad) {
  return fma(simd::splat(alpha), grad, sum);
}

struct GateSlopes {
  float slope, pull_residual, pull_key;
};

EHC_SIMD GateSlopes gate_slopes(float grad_alpha, const GateScalars& gate, int64_t hidden,
                                float clamp) {
  return {gate_slope(grad_alpha, gate.dot, gate.alpha, gate.rstd_residual, gate.rstd_key,
                     gate_scale<float>(hidden), clamp),
          gate_pull(gate.dot, gate.rstd_residual, hidden),
          gate_pull(gate.dot, gate.rstd_key, hidden)};
}

struct GateGradient {
  simd::Pair residual, key;
};

// `grad` belongs to the residual path. Adds the token's part of the weight's gradient to
// `grad_weight`; tokens come in ascending order.
EHC_SIMD GateGradient gate_gradient(const GateSlopes& slopes, simd::Pair grad, simd::Pair residual,
                                    simd::Pair key, simd::Pair weight, simd::Pair& grad_weight) {
  const simd::Vec slope = simd::splat(slopes.slope);
  const simd::Pair of_residual =
      fma(simd::splat(-slopes.pull_residual), residual, mul(key, weight));
  const simd::Pair of_key = fma(simd::splat(-slopes.pull_key), key, mul(residual, weight));
  grad_weight = fma(mul(residual, slope), key, grad_weight);
  return {fma(slope, of_residual, grad), mul(of_key, slope)};
}

}  // namespace
}  // namespace ehc::engram::EHC_ISA
