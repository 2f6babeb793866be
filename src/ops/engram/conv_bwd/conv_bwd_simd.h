// Vector steps of the convolution's backward pass, shared by the convolution and the whole layer.
//
// The norm weight g is folded into the taps: with n the rows without it, c = sum_k (W g)[k] n, the
// sums S[k] = sum_t gc n give gW[k] = g S[k] and gg = sum_k W[k] S[k], and g gu = sum_j (W g) gc.
// A run of tokens of one stream: n and gc = G * silu'(c) in a tile of columns, whose first rows
// hold n of the history, computed anew, and gc of the run before, carried over. Each token also
// finishes g gu of the one (w-1)*dilation before it, the last that looks at it.
#pragma once

#include "ops/engram/conv/conv_simd.h"
#include "ops/engram/conv_bwd/conv_bwd_args.h"
#include "ops/engram/conv_bwd/conv_bwd_math.h"
#include "ops/engram/shared/grad_runs_simd.h"

namespace ehc::engram::EHC_ISA {
namespace {

// Tokens between what a tile reads and what it prefetches.
inline constexpr int kFarTokens = 8;
static_assert(kPair <= kConvTileColumns);

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

// Taps times norm weight, behind the rows of conv_prepare.
EHC_SIMD const float* folded_tap(const PreparedWeights& weights, int64_t k, int64_t stream) {
  return weights.tap(weights.taps + 1 + k, stream);
}

// Sums over the tokens of a chunk and stream: a row for each tap.
struct PartialRows {
  float* data;
  int64_t row;
  EHC_SIMD float* of(int64_t tap) const { return data + tap * row; }
};

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
    normals_ = scratch;
    grad_conv_ = normals_ + sizes.tile_rows * kConvTileColumns;
    rows_ = grad_conv_ + sizes.tile_rows * kConvTileColumns;
    sums_ = rows_ + sizes.final_rows * weights.row;
    carry_ = sums_ + sizes.final_rows * kConvTileColumns;
  }

  // g gu of the tokens that a run finishes, which are not masked: rows from final_begin on.
  EHC_SIMD float* row(const GradRun& r, int64_t token) {
    return rows_ + (token - r.final_begin) * weights_.row;
  }
  // mean(g gu n)
  EHC_SIMD float mean(const GradRun& r, int64_t token) const {
    return reduce_add(simd::load(row_sum(r, token))) / static_cast<float>(hidden_);
  }

  // Fills row() and mean() for one stream, whose carried rows are those of `turn`. work_ahead() is
  // called between: memory traffic of later runs.
  template <class Ahead>
  void run(const GradRun& r, int64_t stream, int64_t turn, const PartialRows& partials,
           Ahead& ahead) {
    for (int64_t t = r.run.begin; t < r.run.end; ++t) {
      first_tap_[t - r.run.begin] = static_cast<int16_t>(first_tap(conv_, r.run, t));
    }
    for (int64_t t = r.final_begin; t < r.final_end; ++t) {
      seen_[t - r.final_begin] = static_cast<int16_t>(seen_by(r, t));
      simd::store(row_sum(r, t), simd::zero_pair());
    }
    float* carry = carry_ + turn * history_ * weights_.row;
    for (int64_t i = 0; i < hidden_; i += kPair) {
      tile({r,
            stream,
            i,
            hidden_ - i,
            folded_tap(weights_, 0, stream) + i,
            weights_.streams * weights_.row,
            {partials.data + i, partials.row}},
           carry + i * history_, ahead);
    }
  }

  // The same for a run of one token, which it finishes; needs no carried rows.
  void token(const GradRun& r, int64_t stream, const PartialRows& partials) {
    const int64_t t = r.run.begin;
    Pair sum = simd::zero_pair();
    const int64_t first = first_tap(conv_, r.run, t), seen = seen_by(r, t);
    for (int64_t i = 0; i < hidden_; i += kPair) {
      Pair row = simd::zero_pair();
      for (int64_t j = 0; j < seen; ++j) {
        const Pair grad_conv = grad_conv_at(r, t + j * conv_.dilation, stream, i);
        row = fma(simd::load(folded_tap(weights_, conv_.taps - 1 - j, stream) + i), grad_conv, row);
        if (j > 0) continue;
        for (int64_t k = first; k < conv_.taps; ++k) {
          add_to(partials.of(k) + i, grad_conv, normal_at(t - lag(k), stream, i));
        }
      }
      sum = fma(row, normal_at(t, stream, i), sum);
      simd::store(rows_ + i, row);
    }
    simd::store(sums_, sum);
  }

 private:
  // A pair of columns of a run.
  struct Tile {
    const GradRun& r;
    int64_t stream, column, count;
    const float* taps;
    int64_t tap_step;
    PartialRows sums;

    EHC_SIMD Pair tap(int64_t k) const { return simd::load(taps + k * tap_step); }
  };

  EHC_SIMD static void add_to(float* sum, Pair x, Pair y) {
    simd::store(sum, fma(x, y, simd::load(sum)));
  }
  EHC_SIMD int64_t lag(int64_t tap) const { return conv_lag(conv_.taps, conv_.dilation, tap); }
  int64_t seen_by(const GradRun& r, int64_t token) const {
    return conv_seen_by(conv_.taps, conv_.dilation, r.stop - 1 - token);
  }
  EHC_SIMD float* row_sum(const GradRun& r, int64_t token) const {
    return sums_ + (token - r.final_begin) * kConvTileColumns;
  }

  // n: the row of V without its norm weight.
  EHC_SIMD Pair normal_at(int64_t token, int64_t stream, int64_t column) const {
    if (source_.value.masked(token)) return simd::zero_pair();
    return mul(simd::load_some(source_.value.row(token, stream) + column, hidden_ - column),
               simd::splat(source_.value.scale_of(token, stream)));
  }

  Pair grad_conv_at(const GradRun& r, int64_t token, int64_t stream, int64_t column) const {
    if (source_.value.masked(token)) return simd::zero_pair();
    Pair c = simd::zero_pair();
    for (int64_t k = first_tap(conv_, r.run, token); k < conv_.taps; ++k) {
      c = fma(simd::load(folded_tap(weights_, k, stream) + column),
              normal_at(token - lag(k), stream, column), c);
    }
    Pair slope;
    simd::silu_slope<1>(&c, &slope);
    return mul(simd::load_some(source_.grad_row(token, stream) + column, hidden_ - column), slope);
  }

  // Rows of the tile; row 0 belongs to token run.begin - history.
  EHC_SIMD int64_t tile_row(const GradRun& r, int64_t token) const {
    return (token - r.run.begin + history_) * kPair;
  }

  // Passes over the tokens, each of which is a short chain of operations that the processor can
  // overlap with those of other tokens. What a loop uses is in locals, since a vector may be stored
  // anywhere for all that the compiler knows.
  template <class Ahead>
  EHC_SIMD void tile(const Tile& tile, float* carry, Ahead& ahead) {
    const GradRun& r = tile.r;
    const int64_t before = r.run.begin - history_;
    fill(tile, before > r.run.start ? before : r.run.start, r.run.end);
    if (!r.fresh) copy_rows(grad_conv_, carry, history_);
    const bool four = conv_.taps == 4;
    four ? convolve<4>(tile) : convolve<0>(tile);
    differentiate(tile, ahead);
    if (r.own) four ? sum_tap_gradients<4>(tile) : sum_tap_gradients<0>(tile);
    four ? spread<4>(tile) : spread<0>(tile);
    copy_rows(carry, grad_conv_ + tile_row(r, r.run.end - history_), history_);
  }

  EHC_SIMD static void copy_rows(float* to, const float* from, int64_t rows) {
    for (int64_t i = 0; i < rows * kPair; i += kPair) simd::store(to + i, simd::load(from + i));
  }

  // n of tokens [begin, end)
  EHC_SIMD void fill(const Tile& tile, int64_t begin, int64_t end) {
    const ConvSource<A>& values = source_.value;
    const int64_t count = tile.count, step = values.token_stride, streams = values.streams;
    const A* from = values.row(begin, tile.stream) + tile.column;
    const float* scale = values.scale + (begin - values.first_token) * streams + tile.stream;
    const uint8_t* mask = values.mask;
    float* to = normals_ + tile_row(tile.r, begin);
    for (int64_t t = begin; t < end; ++t, from += step, scale += streams, to += kPair) {
      simd::prefetch_near(from + kFarTokens * step);
      simd::store(to, mask && mask[t] ? simd::zero_pair()
                                      : mul(simd::load_some(from, count), simd::splat(*scale)));
    }
  }

  // c, in the place of gc.
  template <int kTaps>
  EHC_SIMD void convolve(const Tile& tile) {
    const GradRun& r = tile.r;
    const int64_t step = conv_.dilation * kPair, taps = conv_.taps,
                  length = r.run.end - r.run.begin;
    const float* normal = normals_ + tile_row(r, r.run.begin);
    float* c = grad_conv_ + tile_row(r, r.run.begin);
    Pair tap[kTaps + 1];
    for (int k = 0; k < kTaps; ++k) tap[k] = tile.tap(k);
    for (int64_t t = 0; t < length; ++t, normal += kPair, c += kPair) {
      const int64_t first = first_tap_[t];
      Pair sum = simd::zero_pair();
      if (kTaps > 0 && first == 0) {
        for (int k = 0; k < kTaps; ++k) {
          sum = fma(tap[k], simd::load(normal - (kTaps - 1 - k) * step), sum);
        }
      } else {
        for (int64_t k = first; k < taps; ++k) {
          sum = fma(tile.tap(k), simd::load(normal - (taps - 1 - k) * step), sum);
        }
      }
      simd::store(c, sum);
    }
  }

  // gc from c
  template <class Ahead>
  EHC_SIMD void differentiate(const Tile& tile, Ahead& ahead) {
    const GradRun& r = tile.r;
    const int64_t count = tile.count, step = source_.grad_token_stride;
    const A* grad = source_.grad_row(r.run.begin, tile.stream) + tile.column;
    const uint8_t* mask = source_.value.mask;
    float* at = grad_conv_ + tile_row(r, r.run.begin);
    for (int64_t t = r.run.begin; t < r.run.end; ++t, grad += step, at += kPair) {
      simd::prefetch_near(grad + kFarTokens * step);
      Pair grad_conv = simd::zero_pair();
      if (!mask || !mask[t]) {
        const Pair c = simd::load(at);
        simd::silu_slope<1>(&c, &grad_conv);
        grad_conv = mul(simd::load_some(grad, count), grad_conv);
      }
      simd::store(at, grad_conv);
      if (t % kTilePairs == 0) ahead.work();
    }
  }

  // S += gc n
  template <int kTaps>
  EHC_SIMD void sum_tap_gradients(const Tile& tile) const {
    const GradRun& r = tile.r;
    const int64_t step = conv_.dilation * kPair, taps = conv_.taps, begin = r.run.begin;
    const float* normal = normals_ + tile_row(r, begin);
    const float* at = grad_conv_ + tile_row(r, begin);
    const uint8_t* mask = source_.value.mask;
    const int64_t length = r.run.end - begin;
    if constexpr (kTaps == 0) {
      for (int64_t k = 0; k < taps; ++k) {
        Pair sum = simd::load(tile.sums.of(k));
        for (int64_t t = 0; t < length; ++t) {
          if (first_tap_[t] > k || (mask && mask[begin + t])) continue;
          sum = fma(simd::load(at + t * kPair),
                    simd::load(normal + t * kPair - (taps - 1 - k) * step), sum);
        }
        simd::store(tile.sums.of(k), sum);
      }
    } else {
      Pair sums[kTaps];
      for (int k = 0; k < kTaps; ++k) sums[k] = simd::load(tile.sums.of(k));
      for (int64_t t = 0; t < length; ++t, normal += kPair, at += kPair) {
        if (mask && mask[begin + t]) continue;
        const Pair grad_conv = simd::load(at);
        const int64_t first = first_tap_[t];
        for (int k = 0; k < kTaps; ++k) {
          if (k < first) continue;
          sums[k] = fma(grad_conv, simd::load(normal - (kTaps - 1 - k) * step), sums[k]);
        }
      }
      for (int k = 0; k < kTaps; ++k) simd::store(tile.sums.of(k), sums[k]);
    }
  }

  // g gu and its products with n for the tokens that the run finishes.
  template <int kTaps>
  EHC_SIMD void spread(const Tile& tile) {
    const GradRun& r = tile.r;
    const int64_t step = conv_.dilation * kPair, row_step = weights_.row;
    const int64_t taps = conv_.taps, length = r.final_end - r.final_begin;
    const float* normal = normals_ + tile_row(r, r.final_begin);
    const float* grad_conv = grad_conv_ + tile_row(r, r.final_begin);
    float* to = rows_ + tile.column;
    float* product = sums_;
    Pair tap[kTaps + 1];
    for (int k = 0; k < kTaps; ++k) tap[k] = tile.tap(k);
    for (int64_t t = 0; t < length; ++t) {
      const int64_t seen = seen_[t];
      Pair sum = simd::zero_pair();
      if (kTaps > 0 && seen == kTaps) {
        for (int j = 0; j < kTaps; ++j) {
          sum = fma(tap[kTaps - 1 - j], simd::load(grad_conv + j * step), sum);
        }
      } else {
        for (int64_t j = 0; j < seen; ++j) {
          sum = fma(tile.tap(taps - 1 - j), simd::load(grad_conv + j * step), sum);
        }
      }
      simd::store(to, sum);
      add_to(product, sum, simd::load(normal));
      normal += kPair;
      grad_conv += kPair;
      to += row_step;
      product += kConvTileColumns;
    }
  }

  const ShortConv& conv_;
  const ConvGradSource<A>& source_;
  const PreparedWeights& weights_;
  int64_t hidden_, history_;
  float *normals_, *grad_conv_, *rows_, *sums_, *carry_;
  int16_t first_tap_[2 * kConvTileHistory];
  int16_t seen_[3 * kConvTileHistory];
};

}  // namespace
}  // namespace ehc::engram::EHC_ISA
