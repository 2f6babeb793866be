// Vector steps of the convolution's backward pass, shared by the convolution and the whole layer.
//
// A run of tokens of one stream: u and gc = G * silu'(c) in a tile of columns, whose first rows
// hold u of the history, computed anew, and gc of the run before, carried over. The gradients gu of
// tokens whose successors are all in the tile are then final: the run lags (w-1)*dilation tokens
// behind.
#pragma once

#include "ops/engram/conv/conv_simd.h"
#include "ops/engram/conv_bwd/conv_bwd_args.h"
#include "ops/engram/conv_bwd/conv_bwd_math.h"
#include "ops/engram/shared/grad_runs_simd.h"

namespace ehc::engram::EHC_ISA {
namespace {

// Pairs of columns, and tokens, worked on together.
inline constexpr int kGradPairs = simd::kPairsTogether >= 4 ? 2 : 1;
inline constexpr int kGradTokens = simd::kPairsTogether >= 2 ? 2 : 1;
static_assert(kGradPairs * kPair <= kConvTileColumns && kPair <= kConvSumLanes);

// V, or v, with the scale that normalises it, and G.
template <class A>
struct ConvGradSource {
  ConvSource<A> value;
  const A* grad;
  int64_t grad_token_stride, grad_stream_stride;

  EHC_SIMD const A* grad_row(int64_t token, int64_t stream) const {
    return grad + token * grad_token_stride + stream * grad_stream_stride;
  }
};

// Sums over the tokens of a chunk and stream: a row for each tap, then the norm weight's.
struct PartialRows {
  float* data;
  int64_t row;
  EHC_SIMD float* of(int64_t tap) const { return data + tap * row; }
};

// gc = G * silu'(c)
template <int kPairs, int kTokens>
EHC_SIMD void grad_of_conv(const Pair* c, const Pair* grad, Pair* grad_conv) {
  simd::silu_slope<kPairs * kTokens>(c, grad_conv);
  for (int i = 0; i < kPairs * kTokens; ++i) grad_conv[i] = mul(grad[i], grad_conv[i]);
}

template <class A>
class ConvGradient {
 public:
  // `scratch`: conv_gradient_sizes(...).floats; `streams` take turns in run().
  ConvGradient(const ShortConv& conv, const ConvGradSource<A>& source,
               const PreparedWeights& weights, int64_t hidden, int64_t run_limit, int64_t streams,
               float* scratch)
      : conv_(conv),
        source_(source),
        weights_(weights),
        hidden_(hidden),
        history_(conv_history(conv.taps, conv.dilation)) {
    const ConvGradientSizes sizes = conv_gradient_sizes(history_, run_limit, streams, hidden);
    u_ = scratch;
    grad_conv_ = u_ + sizes.tile_rows * kConvTileColumns;
    rows_ = grad_conv_ + sizes.tile_rows * kConvTileColumns;
    sums_ = rows_ + sizes.final_rows * weights.row;
    carry_ = sums_ + sizes.final_rows * kConvSumLanes;
  }

  // g gu of the tokens that a run finishes, which are not masked: rows from final_begin on.
  EHC_SIMD float* row(const GradRun& r, int64_t token) {
    return rows_ + (token - r.final_begin) * weights_.row;
  }
  // mean(g gu n)
  EHC_SIMD float mean(const GradRun& r, int64_t token) const {
    return reduce_add(simd::load(sums_ + (token - r.final_begin) * kConvSumLanes)) /
           static_cast<float>(hidden_);
  }

  // Fills row() and mean() for one stream, whose carried rows are those of `turn`. work_ahead() is
  // called between: memory traffic of later runs.
  template <class Ahead>
  void run(const GradRun& r, int64_t stream, int64_t turn, const PartialRows& partials,
           Ahead& ahead) {
    open(r);
    for (int64_t t = r.final_begin; t < r.final_end; ++t) {
      simd::store(sums_ + (t - r.final_begin) * kConvSumLanes, simd::zero_pair());
    }
    float* carry = carry_ + turn * history_ * weights_.row;
    int64_t i = 0;
    for (; i + kGradPairs * kPair <= hidden_; i += kGradPairs * kPair) {
      tile<kGradPairs>(r, stream, i, kPair, carry + i * history_, partials, ahead);
    }
    for (; i < hidden_; i += kPair) {
      tile<1>(r, stream, i, hidden_ - i, carry + i * history_, partials, ahead);
    }
  }

  // The same for a run of one token, which it finishes; needs no carried rows.
  void token(const GradRun& r, int64_t stream, const PartialRows& partials) {
    const int64_t t = r.run.begin;
    const auto count = [&](int64_t i) { return hidden_ - i; };
    Pair sum = simd::zero_pair();
    const int64_t first = first_tap(conv_, r.run, t);
    const int64_t seen = conv_seen_by(conv_.taps, conv_.dilation, r.stop - 1 - t);
    for (int64_t i = 0; i < hidden_; i += kPair) {
      Pair grad_input = simd::zero_pair();
      for (int64_t j = 0; j < seen; ++j) {
        const Pair grad_conv = grad_conv_at(r, t + j * conv_.dilation, stream, i);
        grad_input =
            fma(simd::load(weights_.tap(conv_.taps - 1 - j, stream) + i), grad_conv, grad_input);
        if (j > 0) continue;
        for (int64_t k = first; k < conv_.taps; ++k) {
          const int64_t from = t - conv_lag(conv_.taps, conv_.dilation, k);
          add_to(partials.of(k) + i, grad_conv,
                 conv_input(conv_, source_.value, r.run, from, stream, weights_.norm(stream), i,
                            count(i)));
        }
      }
      const Pair normal = normal_at(t, stream, i, count(i));
      const Pair row = mul(grad_input, simd::load(weights_.norm(stream) + i));
      add_to(partials.of(conv_.taps) + i, grad_input, normal);
      sum = fma(row, normal, sum);
      simd::store(rows_ + i, row);
    }
    simd::store(sums_, sum);
  }

  // n: the row of V without its norm weight.
  EHC_SIMD Pair normal_at(int64_t token, int64_t stream, int64_t column, int64_t count) const {
    return mul(simd::load_some(source_.value.row(token, stream) + column, count),
               simd::splat(source_.value.scale_of(token, stream)));
  }

 private:
  EHC_SIMD static void add_to(float* sum, Pair x, Pair y) {
    simd::store(sum, fma(x, y, simd::load(sum)));
  }

  Pair grad_conv_at(const GradRun& r, int64_t token, int64_t stream, int64_t column) const {
    if (source_.value.masked(token)) return simd::zero_pair();
    const int64_t count = hidden_ - column;
    const Pair c =
        convolve_directly(conv_, source_.value, weights_, r.run, token, stream, column, count);
    const Pair grad = simd::load_some(source_.grad_row(token, stream) + column, count);
    Pair grad_conv;
    grad_of_conv<1, 1>(&c, &grad, &grad_conv);
    return grad_conv;
  }

  // What does not depend on the column.
  void open(const GradRun& r) {
    for (int64_t t = r.run.begin; t < r.run.end; ++t) {
      first_tap_[t - r.run.begin] = static_cast<int16_t>(first_tap(conv_, r.run, t));
    }
    for (int64_t t = r.final_begin; t < r.final_end; ++t) {
      seen_[t - r.final_begin] =
          static_cast<int16_t>(conv_seen_by(conv_.taps, conv_.dilation, r.stop - 1 - t));
    }
  }

  // Row 0 belongs to token run.begin - history.
  template <int kPairs>
  EHC_SIMD float* tile_row(float* tile, const GradRun& r, int64_t token) const {
    return tile + (token - r.run.begin + history_) * (kPairs * kPair);
  }

  template <int kPairs, class Ahead>
  EHC_SIMD void tile(const GradRun& r, int64_t stream, int64_t column, int64_t count, float* carry,
                     const PartialRows& partials, Ahead& ahead) {
    fill<kPairs>(r, stream, column, count, carry);
    int64_t t = r.run.begin;
    if (conv_.taps == 4) {
      for (; t + kGradTokens <= r.run.end; t += kGradTokens) {
        differentiate<kPairs, kGradTokens, true>(r, stream, t, column, count);
        ahead.work();
      }
    }
    for (; t < r.run.end; ++t) {
      differentiate<kPairs, 1, false>(r, stream, t, column, count);
      ahead.work();
    }
    for (int p = 0; p < kPairs; ++p) {
      const int64_t some = p + 1 < kPairs ? kPair : count;
      if (r.own) sum_tap_gradients<kPairs>(r, p, partials, column + p * kPair);
      spread<kPairs>(r, stream, p, column + p * kPair, some, partials);
    }
    const float* last = tile_row<kPairs>(grad_conv_, r, r.run.end - history_);
    std::memcpy(carry, last, static_cast<size_t>(history_) * kPairs * kPair * sizeof(float));
  }

  template <int kPairs>
  EHC_SIMD void fill(const GradRun& r, int64_t stream, int64_t column, int64_t count,
                     const float* carry) {
    const float* norm = weights_.norm(stream);
    int64_t t = r.run.begin - history_;
    if (t < r.run.start) t = r.run.start;
    for (; t < r.run.end; ++t) {
      float* u = tile_row<kPairs>(u_, r, t);
      for (int p = 0; p < kPairs; ++p) {
        simd::store(u + p * kPair, conv_input(conv_, source_.value, r.run, t, stream, norm,
                                              column + p * kPair, p + 1 < kPairs ? kPair : count));
      }
    }
    if (r.fresh) return;
    std::memcpy(grad_conv_, carry, static_cast<size_t>(history_) * kPairs * kPair * sizeof(float));
  }

  // gc of kTokens tokens from `token` on.
  template <int kPairs, int kTokens, bool kFourTaps>
  EHC_SIMD void differentiate(const GradRun& r, int64_t stream, int64_t token, int64_t column,
                              int64_t count) {
    Pair c[kTokens * kPairs], grad[kTokens * kPairs], grad_conv[kTokens * kPairs];
    for (int i = 0; i < kTokens * kPairs; ++i) c[i] = simd::zero_pair();
    // A later token has no fewer taps.
    if (kFourTaps && first_tap_[token - r.run.begin] == 0) {
      for (int k = 0; k < 4; ++k) add_tap<kPairs, kTokens>(r, stream, token, column, k, c);
    } else {
      for (int q = 0; q < kTokens; ++q) {
        for (int64_t k = first_tap_[token + q - r.run.begin]; k < conv_.taps; ++k) {
          add_tap<kPairs, 1>(r, stream, token + q, column, k, c + q * kPairs);
        }
      }
    }
    for (int q = 0; q < kTokens; ++q) {
      const bool masked = source_.value.masked(token + q);
      const A* row = source_.grad_row(token + q, stream) + column;
      for (int p = 0; p < kPairs; ++p) {
        grad[q * kPairs + p] =
            masked ? simd::zero_pair()
                   : simd::load_some(row + p * kPair, p + 1 < kPairs ? kPair : count);
      }
    }
    grad_of_conv<kPairs, kTokens>(c, grad, grad_conv);
    for (int q = 0; q < kTokens; ++q) {
      // Also where c is not finite.
      const bool masked = source_.value.masked(token + q);
      float* to = tile_row<kPairs>(grad_conv_, r, token + q);
      for (int p = 0; p < kPairs; ++p) {
        simd::store(to + p * kPair, masked ? simd::zero_pair() : grad_conv[q * kPairs + p]);
      }
    }
  }

  // c + W[k] * u[t - lag] for kTokens tokens from `token` on.
  template <int kPairs, int kTokens>
  EHC_SIMD void add_tap(const GradRun& r, int64_t stream, int64_t token, int64_t column, int64_t k,
                        Pair* c) const {
    constexpr int kWidth = kPairs * kPair;
    const float* tap = weights_.tap(k, stream) + column;
    const float* u =
        tile_row<kPairs>(u_, r, token) - conv_lag(conv_.taps, conv_.dilation, k) * kWidth;
    for (int p = 0; p < kPairs; ++p) {
      const Pair weight = simd::load(tap + p * kPair);
      for (int q = 0; q < kTokens; ++q) {
        Pair& sum = c[q * kPairs + p];
        sum = fma(weight, simd::load(u + q * kWidth + p * kPair), sum);
      }
    }
  }

  // Adds gc * u of the run's tokens, one pair of columns of the tile.
  template <int kPairs>
  EHC_SIMD void sum_tap_gradients(const GradRun& r, int p, const PartialRows& partials,
                                  int64_t column) const {
    if (conv_.taps == 4) return sum_four_tap_gradients<kPairs>(r, p, partials, column);
    const auto add_tokens = [&](int64_t k, Pair sum) EHC_SIMD_LAMBDA {
      const int64_t lag = conv_lag(conv_.taps, conv_.dilation, k);
      for (int64_t t = r.run.begin; t < r.run.end; ++t) {
        if (first_tap_[t - r.run.begin] > k || source_.value.masked(t)) continue;
        sum = fma(simd::load(tile_row<kPairs>(grad_conv_, r, t) + p * kPair),
                  simd::load(tile_row<kPairs>(u_, r, t - lag) + p * kPair), sum);
      }
      return sum;
    };
    for (int64_t k = 0; k < conv_.taps; ++k) {
      float* sum = partials.of(k) + column;
      simd::store(sum, add_tokens(k, simd::load(sum)));
    }
  }

  // The same with all sums in registers.
  template <int kPairs>
  EHC_SIMD void sum_four_tap_gradients(const GradRun& r, int p, const PartialRows& partials,
                                       int64_t column) const {
    const int64_t row_step = conv_.dilation * kPairs * kPair;
    Pair sums[4];
    for (int k = 0; k < 4; ++k) sums[k] = simd::load(partials.of(k) + column);
    for (int64_t t = r.run.begin; t < r.run.end; ++t) {
      if (source_.value.masked(t)) continue;
      const Pair grad_conv = simd::load(tile_row<kPairs>(grad_conv_, r, t) + p * kPair);
      const float* u = tile_row<kPairs>(u_, r, t) + p * kPair;
      const int64_t first = first_tap_[t - r.run.begin];
      if (first == 0) {
        for (int k = 0; k < 4; ++k) {
          sums[k] = fma(grad_conv, simd::load(u - (3 - k) * row_step), sums[k]);
        }
      } else {
        for (int k = 0; k < 4; ++k) {
          if (k >= first) sums[k] = fma(grad_conv, simd::load(u - (3 - k) * row_step), sums[k]);
        }
      }
    }
    for (int k = 0; k < 4; ++k) simd::store(partials.of(k) + column, sums[k]);
  }

  // gu, g gu and their sums for the tokens that the run finishes, one pair of columns of the tile.
  template <int kPairs>
  EHC_SIMD void spread(const GradRun& r, int64_t stream, int p, int64_t column, int64_t count,
                       const PartialRows& partials) {
    const float* taps = weights_.tap(conv_.taps - 1, stream) + column;
    const int64_t tap_step = weights_.streams * weights_.row;
    const int64_t row_step = conv_.dilation * kPairs * kPair;
    const bool four_taps = conv_.taps == 4;
    Pair tap[4];
    for (int j = 0; j < 4; ++j) {
      tap[j] = four_taps ? simd::load(taps - j * tap_step) : simd::zero_pair();
    }
    const Pair norm = simd::load(weights_.norm(stream) + column);
    float* norm_sum_row = partials.of(conv_.taps) + column;
    Pair norm_sum = simd::load(norm_sum_row);
    for (int64_t t = r.final_begin; t < r.final_end; ++t) {
      if (source_.value.masked(t)) continue;
      const float* grad_conv = tile_row<kPairs>(grad_conv_, r, t) + p * kPair;
      Pair grad_input = simd::zero_pair();
      const int64_t seen = seen_[t - r.final_begin];
      if (four_taps && seen == 4) {
        for (int j = 0; j < 4; ++j) {
          grad_input = fma(tap[j], simd::load(grad_conv + j * row_step), grad_input);
        }
      } else {
        for (int64_t j = 0; j < seen; ++j) {
          grad_input = fma(simd::load(taps - j * tap_step), simd::load(grad_conv + j * row_step),
                           grad_input);
        }
      }
      const Pair normal = normal_at(t, stream, column, count);
      const Pair scaled = mul(grad_input, norm);
      norm_sum = fma(grad_input, normal, norm_sum);
      add_to(sums_ + (t - r.final_begin) * kConvSumLanes, scaled, normal);
      simd::store(row(r, t) + column, scaled);
    }
    simd::store(norm_sum_row, norm_sum);
  }

  const ShortConv& conv_;
  const ConvGradSource<A>& source_;
  const PreparedWeights& weights_;
  int64_t hidden_, history_;
  float *u_, *grad_conv_, *rows_, *sums_, *carry_;
  int16_t first_tap_[2 * kConvTileHistory];
  int16_t seen_[3 * kConvTileHistory];
};

}  // namespace
}  // namespace ehc::engram::EHC_ISA
