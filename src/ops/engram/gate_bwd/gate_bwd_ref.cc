// engram.gate_bwd in plain loops, natural order, in double and in float.
#include "ops/engram/gate_bwd/gate_bwd_math.h"
#include "ops/engram/shared/gate_bwd_reference.h"
#include "ops/engram/shared/gate_reference.h"

namespace ehc::engram {

namespace {

// As the forward saves them: in fp32, so that saved and computed ones give the same bits.
template <class Real>
StreamGate<Real> saved_gate(const GateForwardArgs& a, int64_t t, int64_t h) {
  const auto at = [&](const StreamStatistic& from) -> Real {
    return from.data[t * from.token_stride + h];
  };
  if (a.dot.data != nullptr) {
    return {at(a.dot), at(a.alpha), at(a.rstd_residual), at(a.rstd_key)};
  }
  const StreamGate<Real> gate = gate_of_stream<Real>(a, t, h);
  return {static_cast<float>(gate.dot), static_cast<float>(gate.alpha),
          static_cast<float>(gate.rstd_residual), static_cast<float>(gate.rstd_key)};
}

template <class Real>
void write_token(const GateBackwardArgs& a, int64_t t, Real* slopes) {
  const GateForwardArgs& f = a.gate;
  const Real scale = gate_scale<Real>(f.hidden);
  StreamGate<Real> gates[8];
  for (int64_t h = 0; h < f.streams; ++h) {
    const StreamGate<Real> gate = gates[h] = saved_gate<Real>(f, t, h);
    Real grad_alpha = 0;
    for (int64_t i = 0; i < f.hidden; ++i) {
      const Real grad =
          load_float(a.grad_value_path.data, f.activation, row_of(a.grad_value_path, t, h) + i);
      const Real v = load_float(f.value, f.activation, t * f.value_token_stride + i);
      grad_alpha += grad * v;
    }
    const Real slope = gate_slope(grad_alpha, gate.dot, gate.alpha, gate.rstd_residual,
                                  gate.rstd_key, scale, static_cast<Real>(f.clamp));
    const Real pull_residual = gate_pull(gate.dot, gate.rstd_residual, f.hidden);
    const Real pull_key = gate_pull(gate.dot, gate.rstd_key, f.hidden);
    for (int64_t i = 0; i < f.hidden; ++i) {
      const Real x = load_float(f.residual, f.activation,
                                t * f.residual_token_stride + h * f.residual_stream_stride + i);
      const Real k =
          load_float(f.key, f.activation, t * f.key_token_stride + h * f.key_stream_stride + i);
      const Real w = f.weight_fused[h * f.weight_stream_stride + i];
      const Real grad = load_float(a.grad_out.data, f.activation, row_of(a.grad_out, t, h) + i);
      store_float(a.grad_residual.data, f.activation, row_of(a.grad_residual, t, h) + i,
                  grad + slope * (k * w - x * pull_residual));
      store_float(a.grad_key.data, f.activation, row_of(a.grad_key, t, h) + i,
                  slope * (x * w - k * pull_key));
    }
    slopes[t * f.streams + h] = slope;
  }
  for (int64_t i = 0; i < f.hidden; ++i) {
    Real sum = 0;
    for (int64_t h = 0; h < f.streams; ++h) {
      const Real grad =
          load_float(a.grad_value_path.data, f.activation, row_of(a.grad_value_path, t, h) + i);
      sum += gates[h].alpha * grad;
    }
    store_float(a.grad_value.data, f.activation, row_of(a.grad_value, t, 0) + i, sum);
  }
}

bool masked(const GateBackwardArgs& a, int64_t t) {
  return a.gate.image_token_mask != nullptr && a.gate.image_token_mask[t] != 0;
}

}  // namespace

template <class Real>
void gate_bwd_reference_tokens(const GateBackwardArgs& a, Real* slopes, int64_t begin,
                               int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    if (masked(a, t)) {
      write_image_token(a, t);
    } else {
      write_token(a, t, slopes);
    }
  }
}

template <class Real>
void gate_bwd_reference_chunk(const GateBackwardArgs& a, const Real* slopes, int64_t begin,
                              int64_t end, const GradWeightRows& grad_weight) {
  const GateForwardArgs& f = a.gate;
  for (int64_t h = 0; h < f.streams; ++h) {
    for (int64_t i = 0; i < f.hidden; ++i) {
      Real sum = 0;
      for (int64_t t = begin; t < end; ++t) {
        if (masked(a, t)) continue;
        const Real x = load_float(f.residual, f.activation,
                                  t * f.residual_token_stride + h * f.residual_stream_stride + i);
        const Real k =
            load_float(f.key, f.activation, t * f.key_token_stride + h * f.key_stream_stride + i);
        sum += slopes[t * f.streams + h] * x * k;
      }
      grad_weight.data[h * grad_weight.stream_stride + i] = static_cast<float>(sum);
    }
  }
}

template void gate_bwd_reference_tokens<double>(const GateBackwardArgs&, double*, int64_t, int64_t);
template void gate_bwd_reference_tokens<float>(const GateBackwardArgs&, float*, int64_t, int64_t);
template void gate_bwd_reference_chunk<double>(const GateBackwardArgs&, const double*, int64_t,
                                               int64_t, const GradWeightRows&);
template void gate_bwd_reference_chunk<float>(const GateBackwardArgs&, const float*, int64_t,
                                              int64_t, const GradWeightRows&);

}  // namespace ehc::engram
