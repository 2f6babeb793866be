// The convolution's backward pass in plain loops: the reference of engram.conv_bwd and
// engram.layer_bwd. `normal(t, h, i)`: the row of V without its norm weight, 0 for an image token;
// grad_conv (gc) and grad_input (gu) are [T, n, d], gc 0 for image tokens.
#pragma once

#include "ops/engram/conv_bwd/conv_bwd_args.h"
#include "ops/engram/conv_bwd/conv_bwd_math.h"
#include "ops/engram/shared/conv_reference.h"

namespace ehc::engram {

struct ConvSizes {
  int64_t tokens, streams, hidden;
  const uint8_t* image_token_mask;

  [[nodiscard]] int64_t at(int64_t t, int64_t h, int64_t i) const {
    return (t * streams + h) * hidden + i;
  }
  [[nodiscard]] bool masked(int64_t t) const {
    return image_token_mask != nullptr && image_token_mask[t] != 0;
  }
};

// gc of tokens [begin, end).
template <class Real, class Normal, class GradOut>
void grad_conv_rows(const ShortConv& conv, const ConvSizes& shape, const Normal& normal,
                    const GradOut& grad_out, Real* grad_conv, int64_t begin, int64_t end) {
  const auto normalised = [&](int64_t t, int64_t h, int64_t i) {
    return normal(t, h, i) * conv_norm_weight<Real>(conv, h, i);
  };
  for (int64_t t = begin; t < end; ++t) {
    const Sequence sequence = sequence_of_token(conv, shape.tokens, t);
    for (int64_t h = 0; h < shape.streams; ++h) {
      for (int64_t i = 0; i < shape.hidden; ++i) {
        Real& to = grad_conv[shape.at(t, h, i)];
        to = 0;
        if (shape.masked(t)) continue;
        to = grad_out(t, h, i) * silu_slope(convolve<Real>(conv, normalised, sequence, t, h, i));
      }
    }
  }
}

// gu of a row; returns mean(g gu n).
template <class Real, class Normal>
Real grad_input_row(const ShortConv& conv, const ConvSizes& shape, const Sequence& sequence,
                    const Normal& normal, const Real* grad_conv, Real* grad_input, int64_t t,
                    int64_t h) {
  const int64_t seen = conv_seen_by(conv.taps, conv.dilation, sequence.end - 1 - t);
  Real sum = 0;
  for (int64_t i = 0; i < shape.hidden; ++i) {
    const int64_t weights =
        h * conv.conv_weight_stream_stride + i * conv.conv_weight_channel_stride;
    Real grad = 0;
    for (int64_t j = 0; j < seen; ++j) {
      const Real weight = load_float(conv.conv_weight, conv.weight, weights + conv.taps - 1 - j);
      grad = std::fma(weight, grad_conv[shape.at(t + j * conv.dilation, h, i)], grad);
    }
    grad_input[shape.at(t, h, i)] = grad;
    sum += grad * conv_norm_weight<Real>(conv, h, i) * normal(t, h, i);
  }
  return sum / static_cast<Real>(shape.hidden);
}

// gV of an element that is not masked; `rstd` of V, `mean` of the row.
template <class Real, class Normal>
Real grad_gated_value(const ShortConv& conv, const ConvSizes& shape, const Normal& normal,
                      const Real* grad_input, Real rstd, Real mean, Real grad_out, int64_t t,
                      int64_t h, int64_t i) {
  const Real scaled = grad_input[shape.at(t, h, i)] * conv_norm_weight<Real>(conv, h, i);
  return grad_out + rstd * (scaled - normal(t, h, i) * mean);
}

template <class Real>
void store_weight_gradient(const ConvWeightGradient& to, int64_t h, int64_t i, Real gradient) {
  const float* target =
      to.target == nullptr ? nullptr
                           : to.target + h * to.target_stream_stride + i * to.target_channel_stride;
  to.data[h * to.stream_stride + i * to.channel_stride] =
      target == nullptr ? static_cast<float>(gradient) : static_cast<float>(*target + gradient);
}

// Gradients of both weights, of streams [begin, end).
template <class Real, class Normal>
void conv_weight_gradients(const ShortConv& conv, const ConvSizes& shape, const Normal& normal,
                           const Real* grad_conv, const Real* grad_input,
                           const ConvWeightGradient& of_taps, const ConvWeightGradient& of_norm,
                           int64_t begin, int64_t end) {
  for (int64_t h = begin; h < end; ++h) {
    for (int64_t i = 0; i < shape.hidden; ++i) {
      const Real norm_weight = conv_norm_weight<Real>(conv, h, i);
      for (int64_t k = 0; k < conv.taps; ++k) {
        const int64_t lag = conv_lag(conv.taps, conv.dilation, k);
        Real sum = 0;
        for (int64_t b = 0; b < conv.sequences; ++b) {
          const Sequence sequence = sequence_at(conv, shape.tokens, b);
          for (int64_t t = sequence.begin + lag; t < sequence.end; ++t) {
            if (shape.masked(t)) continue;
            sum += grad_conv[shape.at(t, h, i)] * (normal(t - lag, h, i) * norm_weight);
          }
        }
        ConvWeightGradient tap = of_taps;
        tap.data += k;
        if (tap.target != nullptr) tap.target += k;
        store_weight_gradient(tap, h, i, sum);
      }
      Real sum = 0;
      for (int64_t t = 0; t < shape.tokens; ++t) {
        if (!shape.masked(t)) sum += grad_input[shape.at(t, h, i)] * normal(t, h, i);
      }
      store_weight_gradient(of_norm, h, i, sum);
    }
  }
}

}  // namespace ehc::engram
