// engram.conv_bwd in plain loops, natural order, in double and in float. norms are [T, n],
// grad_conv (gc) and grad_input (gu) [T, n, d].
#include "ops/engram/shared/conv_bwd_reference.h"

namespace ehc::engram {

namespace {

bool is_masked(const ConvForwardArgs& a, int64_t t) {
  return a.image_token_mask != nullptr && a.image_token_mask[t] != 0;
}

// A row of V without its norm weight: 0 for an image token.
template <class Real>
auto normal_by(const ConvForwardArgs& a, const Real* norms) {
  return [&a, norms](int64_t t, int64_t h, int64_t i) {
    if (is_masked(a, t)) return Real(0);
    const Real value = load_float(a.gated_value, a.activation,
                                  t * a.value_token_stride + h * a.value_stream_stride + i);
    return value * norms[t * a.streams + h];
  };
}

template <class Real>
auto grad_out_of(const ConvBackwardArgs& a) {
  return [&a](int64_t t, int64_t h, int64_t i) -> Real {
    return load_float(a.grad_out, a.forward.activation,
                      t * a.grad_token_stride + h * a.grad_stream_stride + i);
  };
}

ConvSizes shape_of(const ConvForwardArgs& a) {
  return {a.tokens, a.streams, a.hidden, a.image_token_mask};
}

}  // namespace

template <class Real>
void conv_bwd_reference_conv(const ConvBackwardArgs& a, const Real* norms, Real* grad_conv,
                             int64_t begin, int64_t end) {
  grad_conv_rows<Real>(a.forward.conv, shape_of(a.forward), normal_by(a.forward, norms),
                       grad_out_of<Real>(a), grad_conv, begin, end);
}

template <class Real>
void conv_bwd_reference_rows(const ConvBackwardArgs& a, const Real* norms, const Real* grad_conv,
                             Real* grad_input, int64_t begin, int64_t end) {
  const ConvForwardArgs& f = a.forward;
  const ConvSizes shape = shape_of(f);
  const auto normal = normal_by(f, norms);
  const auto grad_out = grad_out_of<Real>(a);
  for (int64_t t = begin; t < end; ++t) {
    const Sequence sequence = sequence_of_token(f.conv, f.tokens, t);
    for (int64_t h = 0; h < f.streams; ++h) {
      const int64_t out = t * a.grad_value_token_stride + h * a.grad_value_stream_stride;
      if (is_masked(f, t)) {
        for (int64_t i = 0; i < f.hidden; ++i) {
          store_float(a.grad_value, f.activation, out + i, Real(0));
        }
        continue;
      }
      const Real mean =
          grad_input_row<Real>(f.conv, shape, sequence, normal, grad_conv, grad_input, t, h);
      for (int64_t i = 0; i < f.hidden; ++i) {
        const Real grad = grad_out(t, h, i);
        store_float(a.grad_value, f.activation, out + i,
                    grad_gated_value(f.conv, shape, normal, grad_input, norms[t * f.streams + h],
                                     mean, grad, t, h, i));
      }
    }
  }
}

template <class Real>
void conv_bwd_reference_sums(const ConvBackwardArgs& a, const Real* norms, const Real* grad_conv,
                             const Real* grad_input, int64_t begin, int64_t end) {
  const ConvForwardArgs& f = a.forward;
  conv_weight_gradients<Real>(f.conv, shape_of(f), normal_by(f, norms), grad_conv, grad_input,
                              a.sums.of_taps, a.sums.of_norm, begin, end);
}

#define EHC_INSTANTIATE(Real)                                                                     \
  template void conv_bwd_reference_conv(const ConvBackwardArgs&, const Real*, Real*, int64_t,     \
                                        int64_t);                                                 \
  template void conv_bwd_reference_rows(const ConvBackwardArgs&, const Real*, const Real*, Real*, \
                                        int64_t, int64_t);                                        \
  template void conv_bwd_reference_sums(const ConvBackwardArgs&, const Real*, const Real*,        \
                                        const Real*, int64_t, int64_t)
EHC_INSTANTIATE(double);
EHC_INSTANTIATE(float);
#undef EHC_INSTANTIATE

}  // namespace ehc::engram
