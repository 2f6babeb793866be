// engram.layer_fwd with a convolution in plain loops, natural order, in double and in float.
// alpha and beta are [T, n].
#include "ops/engram/layer/layer_args.h"
#include "ops/engram/shared/conv_reference.h"
#include "ops/engram/shared/gate_reference.h"

namespace ehc::engram {

namespace {

bool is_masked(const GateForwardArgs& a, int64_t t) {
  return a.image_token_mask != nullptr && a.image_token_mask[t] != 0;
}

float value_at(const GateForwardArgs& a, int64_t t, int64_t i) {
  return load_float(a.value, a.activation, t * a.value_token_stride + i);
}

// u of a token of the chunk.
template <class Real>
auto normalised_by(const LayerForwardArgs& a, const Real* beta) {
  return [&a, beta](int64_t t, int64_t h, int64_t i) {
    if (is_masked(a.gate, t)) return Real(0);
    return (value_at(a.gate, t, i) * beta[t * a.gate.streams + h]) *
           conv_norm_weight<Real>(a.conv, h, i);
  };
}

}  // namespace

template <class Real>
void layer_reference_gates(const LayerForwardArgs& a, Real* alpha, Real* beta, int64_t begin,
                           int64_t end) {
  const GateForwardArgs& gate = a.gate;
  for (int64_t t = begin; t < end; ++t) {
    if (is_masked(gate, t)) {
      gate_fwd_reference(gate, t, t + 1);  // copies the residual
      continue;
    }
    const Real mean_square = mean_square_of_value<Real>(gate, t);
    for (int64_t h = 0; h < gate.streams; ++h) {
      const StreamGate<Real> of_stream = gate_of_stream<Real>(gate, t, h);
      save_gate(gate, t, h, of_stream);
      alpha[t * gate.streams + h] = of_stream.alpha;
      beta[t * gate.streams + h] =
          conv_beta(of_stream.alpha, mean_square, static_cast<Real>(a.conv.eps));
    }
  }
}

template <class Real>
void layer_reference_rows(const LayerForwardArgs& a, const Real* alpha, const Real* beta,
                          int64_t begin, int64_t end) {
  const GateForwardArgs& gate = a.gate;
  const auto normalised = normalised_by(a, beta);
  for (int64_t t = begin; t < end; ++t) {
    if (is_masked(gate, t)) continue;
    const Sequence sequence = sequence_of_token(a.conv, gate.tokens, t);
    for (int64_t h = 0; h < gate.streams; ++h) {
      const int64_t residual = t * gate.residual_token_stride + h * gate.residual_stream_stride;
      const int64_t out = t * gate.out_token_stride + h * gate.out_stream_stride;
      for (int64_t i = 0; i < gate.hidden; ++i) {
        const Real x = load_float(gate.residual, gate.activation, residual + i);
        Real sum =
            std::fma(alpha[t * gate.streams + h], static_cast<Real>(value_at(gate, t, i)), x);
        if (a.round_twice) {
          store_float(gate.out, gate.activation, out + i, sum);
          sum = load_float(gate.out, gate.activation, out + i);
        }
        const Real c = convolve<Real>(a.conv, normalised, sequence, t, h, i);
        store_float(gate.out, gate.activation, out + i, sum + silu(c));
      }
    }
  }
}

template <class Real>
void layer_reference_state(const LayerForwardArgs& a, const Real* beta, int64_t begin,
                           int64_t end) {
  const GateForwardArgs& gate = a.gate;
  write_next_state(a.conv, normalised_by(a, beta), gate.tokens, gate.streams, gate.hidden, begin,
                   end);
}

#define EHC_INSTANTIATE(Real)                                                                    \
  template void layer_reference_gates(const LayerForwardArgs&, Real*, Real*, int64_t, int64_t);  \
  template void layer_reference_rows(const LayerForwardArgs&, const Real*, const Real*, int64_t, \
                                     int64_t);                                                   \
  template void layer_reference_state(const LayerForwardArgs&, const Real*, int64_t, int64_t)
EHC_INSTANTIATE(double);
EHC_INSTANTIATE(float);
#undef EHC_INSTANTIATE

}  // namespace ehc::engram
