// engram.layer_bwd with a convolution in plain loops, natural order, in double and in float.
#include "ops/engram/gate_bwd/gate_bwd_math.h"
#include "ops/engram/shared/conv_bwd_reference.h"
#include "ops/engram/shared/gate_bwd_reference.h"
#include "ops/engram/shared/layer_bwd_reference.h"

namespace ehc::engram {

namespace {

ConvSizes sizes_of(const GateForwardArgs& a) {
  return {a.tokens, a.streams, a.hidden, a.image_token_mask};
}

float value_at(const GateForwardArgs& a, int64_t t, int64_t i) {
  return load_float(a.value, a.activation, t * a.value_token_stride + i);
}

template <class Real>
Real grad_out_at(const LayerBackwardArgs& a, int64_t t, int64_t h, int64_t i) {
  const GradientRows& rows = a.gate.grad_out;
  return load_float(rows.data, a.gate.gate.activation, row_of(rows, t, h) + i);
}

// n = v * beta, 0 for an image token.
template <class Real>
auto normal_by(const GateForwardArgs& a, const LayerGate<Real>* gates) {
  return [&a, gates](int64_t t, int64_t h, int64_t i) {
    if (sizes_of(a).masked(t)) return Real(0);
    return value_at(a, t, i) * gates[t * a.streams + h].beta;
  };
}

// grad_x and grad_k of a row; `grad_value` is its gV.
template <class Real>
Real write_stream(const LayerBackwardArgs& a, const StreamGate<Real>& gate, const Real* grad_value,
                  int64_t t, int64_t h) {
  const GateForwardArgs& f = a.gate.gate;
  Real grad_alpha = 0;
  for (int64_t i = 0; i < f.hidden; ++i) grad_alpha += grad_value[i] * value_at(f, t, i);
  const Real slope = gate_slope(grad_alpha, gate.dot, gate.alpha, gate.rstd_residual, gate.rstd_key,
                                gate_scale<Real>(f.hidden), static_cast<Real>(f.clamp));
  const Real pull_residual = gate_pull(gate.dot, gate.rstd_residual, f.hidden);
  const Real pull_key = gate_pull(gate.dot, gate.rstd_key, f.hidden);
  for (int64_t i = 0; i < f.hidden; ++i) {
    const Real x = load_float(f.residual, f.activation,
                              t * f.residual_token_stride + h * f.residual_stream_stride + i);
    const Real k =
        load_float(f.key, f.activation, t * f.key_token_stride + h * f.key_stream_stride + i);
    const Real w = f.weight_fused[h * f.weight_stream_stride + i];
    store_float(a.gate.grad_residual.data, f.activation, row_of(a.gate.grad_residual, t, h) + i,
                grad_out_at<Real>(a, t, h, i) + slope * (k * w - x * pull_residual));
    store_float(a.gate.grad_key.data, f.activation, row_of(a.gate.grad_key, t, h) + i,
                slope * (x * w - k * pull_key));
  }
  return slope;
}

}  // namespace

template <class Real>
void layer_bwd_reference_gates(const LayerBackwardArgs& a, LayerGate<Real>* gates, int64_t begin,
                               int64_t end) {
  const GateForwardArgs& f = a.gate.gate;
  for (int64_t t = begin; t < end; ++t) {
    if (sizes_of(f).masked(t)) continue;
    const Real mean_square = mean_square_of_value<Real>(f, t);
    for (int64_t h = 0; h < f.streams; ++h) {
      LayerGate<Real>& gate = gates[t * f.streams + h];
      // As the forward would have saved them.
      const StreamGate<Real> exact = gate_of_stream<Real>(f, t, h);
      gate.gate = {static_cast<float>(exact.dot), static_cast<float>(exact.alpha),
                   static_cast<float>(exact.rstd_residual), static_cast<float>(exact.rstd_key)};
      gate.beta = conv_beta(gate.gate.alpha, mean_square, static_cast<Real>(a.conv.eps));
      gate.rstd_value = conv_rstd(gate.gate.alpha, mean_square, static_cast<Real>(a.conv.eps));
    }
  }
}

template <class Real>
void layer_bwd_reference_conv(const LayerBackwardArgs& a, const LayerBackwardArrays<Real>& arrays,
                              int64_t begin, int64_t end) {
  const GateForwardArgs& f = a.gate.gate;
  grad_conv_rows<Real>(
      a.conv, sizes_of(f), normal_by(f, arrays.gates),
      [&](int64_t t, int64_t h, int64_t i) { return grad_out_at<Real>(a, t, h, i); },
      arrays.grad_conv, begin, end);
}

template <class Real>
void layer_bwd_reference_inputs(const LayerBackwardArgs& a, const LayerBackwardArrays<Real>& arrays,
                                int64_t begin, int64_t end) {
  const GateForwardArgs& f = a.gate.gate;
  for (int64_t t = begin; t < end; ++t) {
    if (sizes_of(f).masked(t)) continue;
    const Sequence sequence = sequence_of_token(a.conv, f.tokens, t);
    for (int64_t h = 0; h < f.streams; ++h) {
      arrays.gates[t * f.streams + h].mean =
          grad_input_row<Real>(a.conv, sizes_of(f), sequence, normal_by(f, arrays.gates),
                               arrays.grad_conv, arrays.grad_input, t, h);
    }
  }
}

template <class Real>
void layer_bwd_reference_sums(const LayerBackwardArgs& a, const LayerBackwardArrays<Real>& arrays,
                              int64_t begin, int64_t end) {
  const GateForwardArgs& f = a.gate.gate;
  conv_weight_gradients<Real>(a.conv, sizes_of(f), normal_by(f, arrays.gates), arrays.grad_conv,
                              arrays.grad_input, a.sums.of_taps, a.sums.of_norm, begin, end);
}

template <class Real>
void layer_bwd_reference_tokens(const LayerBackwardArgs& a, const LayerBackwardArrays<Real>& arrays,
                                int64_t begin, int64_t end) {
  const GateForwardArgs& f = a.gate.gate;
  const ConvSizes sizes = sizes_of(f);
  const auto normal = normal_by(f, arrays.gates);
  for (int64_t t = begin; t < end; ++t) {
    if (sizes.masked(t)) {
      write_image_token(a.gate, t);
      continue;
    }
    for (int64_t h = 0; h < f.streams; ++h) {
      const LayerGate<Real>& gate = arrays.gates[t * f.streams + h];
      Real* grad_value = arrays.grad_conv + sizes.at(t, h, 0);  // gV in the place of gc
      for (int64_t i = 0; i < f.hidden; ++i) {
        grad_value[i] = grad_gated_value(a.conv, sizes, normal, arrays.grad_input, gate.rstd_value,
                                         gate.mean, grad_out_at<Real>(a, t, h, i), t, h, i);
      }
      arrays.slopes[t * f.streams + h] = write_stream(a, gate.gate, grad_value, t, h);
    }
    for (int64_t i = 0; i < f.hidden; ++i) {
      Real sum = 0;
      for (int64_t h = 0; h < f.streams; ++h) {
        sum += arrays.gates[t * f.streams + h].gate.alpha * arrays.grad_conv[sizes.at(t, h, i)];
      }
      store_float(a.gate.grad_value.data, f.activation, row_of(a.gate.grad_value, t, 0) + i, sum);
    }
  }
}

#define EHC_INSTANTIATE_STEP(Real, step)                             \
  template void layer_bwd_reference_##step(const LayerBackwardArgs&, \
                                           const LayerBackwardArrays<Real>&, int64_t, int64_t)
#define EHC_INSTANTIATE(Real)                                                                  \
  template void layer_bwd_reference_gates(const LayerBackwardArgs&, LayerGate<Real>*, int64_t, \
                                          int64_t);                                            \
  EHC_INSTANTIATE_STEP(Real, conv);                                                            \
  EHC_INSTANTIATE_STEP(Real, inputs);                                                          \
  EHC_INSTANTIATE_STEP(Real, sums);                                                            \
  EHC_INSTANTIATE_STEP(Real, tokens)
EHC_INSTANTIATE(double);
EHC_INSTANTIATE(float);
#undef EHC_INSTANTIATE
#undef EHC_INSTANTIATE_STEP

}  // namespace ehc::engram
