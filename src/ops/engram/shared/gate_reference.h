// The gate of one stream in plain loops: the reference of engram.gate_fwd and engram.layer_fwd.
#pragma once

#include "core/float_formats.h"
#include "core/logistic.h"
#include "ops/engram/gate/gate_args.h"
#include "ops/engram/gate/gate_math.h"

namespace ehc::engram {

// engram.gate_fwd for tokens [begin, end), accumulating in double and in float.
void gate_fwd_reference(const GateForwardArgs& args, int64_t begin, int64_t end);
void gate_fwd_reference_f32(const GateForwardArgs& args, int64_t begin, int64_t end);

template <class Real>
struct StreamGate {
  Real dot = 0, alpha = 0, rstd_residual = 0, rstd_key = 0;
};

template <class Real>
StreamGate<Real> gate_of_stream(const GateForwardArgs& a, int64_t t, int64_t h) {
  const int64_t residual = t * a.residual_token_stride + h * a.residual_stream_stride;
  const int64_t key = t * a.key_token_stride + h * a.key_stream_stride;
  Real residual_squares = 0;
  Real key_squares = 0;
  Real dot = 0;
  for (int64_t i = 0; i < a.hidden; ++i) {
    const Real x = load_float(a.residual, a.activation, residual + i);
    const Real k = load_float(a.key, a.activation, key + i);
    const Real weight = a.weight_fused[h * a.weight_stream_stride + i];
    residual_squares += x * x;
    key_squares += k * k;
    dot += (x * weight) * k;
  }
  StreamGate<Real> gate;
  gate.dot = dot;
  gate.rstd_residual = reciprocal_rms(residual_squares, a.hidden, static_cast<Real>(a.eps));
  gate.rstd_key = reciprocal_rms(key_squares, a.hidden, static_cast<Real>(a.eps));
  const Real logit = gate_logit(dot, gate.rstd_residual, gate.rstd_key, gate_scale<Real>(a.hidden));
  gate.alpha = logistic(gate_signed_root(logit, static_cast<Real>(a.clamp)));
  return gate;
}

template <class Real>
Real mean_square_of_value(const GateForwardArgs& a, int64_t t) {
  Real squares = 0;
  for (int64_t i = 0; i < a.hidden; ++i) {
    const Real v = load_float(a.value, a.activation, t * a.value_token_stride + i);
    squares += v * v;
  }
  return squares / static_cast<Real>(a.hidden);
}

template <class Real>
void save_gate(const GateForwardArgs& a, int64_t t, int64_t h, const StreamGate<Real>& gate) {
  const auto save = [&](const StreamStatistic& to, Real x) {
    if (to.data != nullptr) to.data[t * to.token_stride + h] = static_cast<float>(x);
  };
  save(a.dot, gate.dot);
  save(a.alpha, gate.alpha);
  save(a.rstd_residual, gate.rstd_residual);
  save(a.rstd_key, gate.rstd_key);
}

}  // namespace ehc::engram
