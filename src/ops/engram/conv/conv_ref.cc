// engram.conv_fwd in plain loops, natural order, in double and in float.
#include "ops/engram/shared/conv_reference.h"

namespace ehc::engram {

namespace {

bool is_masked(const ConvForwardArgs& a, int64_t t) {
  return a.image_token_mask != nullptr && a.image_token_mask[t] != 0;
}

float gated_value(const ConvForwardArgs& a, int64_t t, int64_t h, int64_t i) {
  return load_float(a.gated_value, a.activation,
                    t * a.value_token_stride + h * a.value_stream_stride + i);
}

// u of a token of the chunk, given the norms [T, n].
template <class Real>
auto normalised_by(const ConvForwardArgs& a, const Real* norms) {
  return [&a, norms](int64_t t, int64_t h, int64_t i) {
    if (is_masked(a, t)) return Real(0);
    return (gated_value(a, t, h, i) * norms[t * a.streams + h]) *
           conv_norm_weight<Real>(a.conv, h, i);
  };
}

}  // namespace

template <class Real>
void conv_reference_norms(const ConvForwardArgs& a, Real* norms, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    if (is_masked(a, t)) continue;
    for (int64_t h = 0; h < a.streams; ++h) {
      Real squares = 0;
      for (int64_t i = 0; i < a.hidden; ++i) {
        const Real v = gated_value(a, t, h, i);
        squares += v * v;
      }
      norms[t * a.streams + h] = reciprocal_rms(squares, a.hidden, static_cast<Real>(a.conv.eps));
    }
  }
}

template <class Real>
void conv_reference_rows(const ConvForwardArgs& a, const Real* norms, int64_t begin, int64_t end) {
  const auto normalised = normalised_by(a, norms);
  for (int64_t t = begin; t < end; ++t) {
    const Sequence sequence = sequence_of_token(a.conv, a.tokens, t);
    for (int64_t h = 0; h < a.streams; ++h) {
      for (int64_t i = 0; i < a.hidden; ++i) {
        Real y = 0;
        if (!is_masked(a, t)) {
          y = gated_value(a, t, h, i) + silu(convolve<Real>(a.conv, normalised, sequence, t, h, i));
        }
        store_float(a.out, a.activation, t * a.out_token_stride + h * a.out_stream_stride + i, y);
      }
    }
  }
}

template <class Real>
void conv_reference_state(const ConvForwardArgs& a, const Real* norms, int64_t begin, int64_t end) {
  write_next_state(a.conv, normalised_by(a, norms), a.tokens, a.streams, a.hidden, begin, end);
}

#define EHC_INSTANTIATE(Real)                                                               \
  template void conv_reference_norms(const ConvForwardArgs&, Real*, int64_t, int64_t);      \
  template void conv_reference_rows(const ConvForwardArgs&, const Real*, int64_t, int64_t); \
  template void conv_reference_state(const ConvForwardArgs&, const Real*, int64_t, int64_t)
EHC_INSTANTIATE(double);
EHC_INSTANTIATE(float);
#undef EHC_INSTANTIATE

}  // namespace ehc::engram
