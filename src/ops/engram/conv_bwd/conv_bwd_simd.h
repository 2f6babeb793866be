// Vector steps of the convolution's backward pass, shared by the convolution and the whole layer.
//
// The norm weight g and log2(e) are folded into the taps: F[k] = W[k] g log2(e). With n the rows
// without norm weight and gc' = gc log2(e), which is what silu_gradient gives for F n,
//   gg' = sum_j F gc' = log2(e)^2 g gu        S'[k] = sum_t gc' n, of which gW = g S' / log2(e)
// and gg = sum_k W[k] S'[k] / log2(e).
// A run of tokens of one stream: n and gc' in a tile of columns, whose first rows hold n of the
// history, computed anew, and gc' of the run before, carried over. Each token also finishes gg' of
// the one (w-1)*dilation before it, the last that looks at it.
#pragma once

#include "ops/engram/conv_bwd/conv_bwd_args.h"
#include "ops/engram/conv_bwd/conv_bwd_math.h"
#include "ops/engram/shared/conv_grad_rows_simd.h"
#include "ops/engram/shared/grad_runs_simd.h"

namespace ehc::engram::EHC_ISA {
namespace {

// Tokens between what a tile reads and what it prefetches.
inline constexpr int kFarTokens = 8;
// Taps of the one number for which there is a walk.
inline constexpr int kWalkTaps = 4;
static_assert(kPair <= kConvTileColumns);

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

  // gg' of the tokens that a run finishes, which are not masked: rows from final_begin on.
  EHC_SIMD float* row(const GradRun& r, int64_t token) {
    return rows_ + (token - r.final_begin) * weights_.row;
  }
  // mean(gg' n)
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
    walks_ = can_walk(r);
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
    Pair grad = simd::load_some(source_.grad_row(token, stream) + column, hidden_ - column);
    simd::silu_gradient<1>(&c, &grad, &grad);
    return grad;
  }

  // Rows of the tile; row 0 belongs to token run.begin - history.
  EHC_SIMD int64_t tile_row(const GradRun& r, int64_t token) const {
    return (token - r.run.begin + history_) * kPair;
  }

  // Where the registers allow it, one walk does it all for the tokens whose taps all lie in the
  // sequence; the others take passes, each of which is a short chain of operations. What a loop
  // uses is in locals, since a vector may be stored anywhere for all that the compiler knows.
  template <class Ahead>
  EHC_SIMD void tile(const Tile& tile, float* carry, Ahead& ahead) {
    const GradRun& r = tile.r;
    const int64_t before = r.run.begin - history_, end = r.run.end;
    const int64_t walked = walks_ && tile.count >= kPair ? walk_begin(r) : end;
    fill(tile, before > r.run.start ? before : r.run.start, walked);
    if (!r.fresh) copy_rows(grad_conv_, carry, history_);
    const bool four = conv_.taps == 4;
    four ? convolve<4>(tile, walked) : convolve<0>(tile, walked);
    differentiate(tile, walked, ahead);
    if (r.own) four ? sum_tap_gradients<4>(tile, walked) : sum_tap_gradients<0>(tile, walked);
    int64_t spread_from = r.final_begin;
    if (walked < end) {
      const int64_t finishing = min(r.final_begin + history_, end);  // not before `walked`
      walk<false>(tile, walked, finishing, ahead);
      walk<true>(tile, finishing, end, ahead);
      if (spread_from < end - history_) spread_from = end - history_;
    }
    four ? spread<4>(tile, spread_from) : spread<0>(tile, spread_from);
    copy_rows(carry, grad_conv_ + tile_row(r, end - history_), history_);
  }

  EHC_SIMD static int64_t min(int64_t x, int64_t y) { return x < y ? x : y; }
  // The first token of the run all of whose taps lie in the sequence.
  EHC_SIMD int64_t walk_begin(const GradRun& r) const {
    const int64_t whole = min(r.run.start + history_, r.run.end);
    return whole < r.run.begin ? r.run.begin : whole;
  }
  bool can_walk(const GradRun& r) const {
    if (simd::kPairsTogether < 4 || conv_.taps != kWalkTaps) return false;
    for (int64_t t = r.run.begin; t < r.run.end; ++t) {
      if (source_.value.masked(t)) return false;
    }
    return true;
  }

  // Everything for tokens [begin, end) of whole taps, none masked: n, gc', S' and, with kFinish,
  // gg' of the tokens history_ before them. A gradient is used kLag tokens after it was computed,
  // so that its long chain of operations overlaps with those of its neighbours.
  template <bool kFinish, class Ahead>
  EHC_SIMD void walk(const Tile& tile, int64_t begin, int64_t end, Ahead& ahead) {
    constexpr int kTaps = kWalkTaps, kLag = 4;
    const GradRun& r = tile.r;
    const int64_t back = conv_.dilation * kPair, row_step = weights_.row;
    const ConvSource<A>& values = source_.value;
    const int64_t value_step = values.token_stride, grad_step = source_.grad_token_stride;
    const A* value = values.row(begin, tile.stream) + tile.column;
    const A* grad = source_.grad_row(begin, tile.stream) + tile.column;
    const float* scale = values.scale + values.at(begin, tile.stream);
    float* normal = normals_ + tile_row(r, begin);
    float* grad_conv = grad_conv_ + tile_row(r, begin);
    float *to = rows_ + tile.column, *product = sums_;
    Pair tap[kTaps], sums[kTaps];
    for (int k = 0; k < kTaps; ++k) tap[k] = tile.tap(k);
    for (int k = 0; k < kTaps; ++k) sums[k] = r.own ? simd::load(tile.sums.of(k)) : tap[k];
    const auto use = [&](int64_t token) EHC_SIMD_LAMBDA {
      const int64_t at = tile_row(r, token);
      const float *n = normals_ + at, *gc = grad_conv_ + at;
      const Pair last = simd::load(gc);
      Pair sum = simd::zero_pair();
      for (int k = 0; k < kTaps; ++k) {
        const int64_t row = (kTaps - 1 - k) * back;
        sums[k] = fma(last, simd::load(n - row), sums[k]);
        if (kFinish)
          sum = fma(tap[kTaps - 1 - k], k + 1 < kTaps ? simd::load(gc - row) : last, sum);
      }
      if (!kFinish) return;
      simd::store(to, sum);
      add_to(product, sum, simd::load(n - (kTaps - 1) * back));
      to += row_step;
      product += kConvTileColumns;
    };
    for (int64_t t = begin; t < end; ++t) {
      simd::prefetch_near(value + kFarTokens * value_step);
      simd::prefetch_near(grad + kFarTokens * grad_step);
      const Pair current = mul(simd::load(value), simd::splat(*scale));
      simd::store(normal, current);
      Pair c = simd::zero_pair();
      for (int k = 0; k + 1 < kTaps; ++k) {
        c = fma(tap[k], simd::load(normal - (kTaps - 1 - k) * back), c);
      }
      c = fma(tap[kTaps - 1], current, c);
      Pair product_of = simd::load(grad);
      if (t - begin >= kLag) use(t - kLag);
      simd::silu_gradient<1>(&c, &product_of, &product_of);
      simd::store(grad_conv, product_of);
      value += value_step;
      grad += grad_step;
      scale += values.streams;
      normal += kPair;
      grad_conv += kPair;
      if (t % kTilePairs == 0) ahead.work();
    }
    for (int64_t t = end - begin > kLag ? end - kLag : begin; t < end; ++t) use(t);
    if (!r.own) return;
    for (int k = 0; k < kTaps; ++k) simd::store(tile.sums.of(k), sums[k]);
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

  // c log2(e) of the run's tokens before `end`, in the place of gc'.
  template <int kTaps>
  EHC_SIMD void convolve(const Tile& tile, int64_t end) {
    const GradRun& r = tile.r;
    const int64_t step = conv_.dilation * kPair, taps = conv_.taps, length = end - r.run.begin;
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

  // gc' from that
  template <class Ahead>
  EHC_SIMD void differentiate(const Tile& tile, int64_t end, Ahead& ahead) {
    const GradRun& r = tile.r;
    const int64_t count = tile.count, step = source_.grad_token_stride;
    const A* grad = source_.grad_row(r.run.begin, tile.stream) + tile.column;
    const uint8_t* mask = source_.value.mask;
    float* at = grad_conv_ + tile_row(r, r.run.begin);
    for (int64_t t = r.run.begin; t < end; ++t, grad += step, at += kPair) {
      simd::prefetch_near(grad + kFarTokens * step);
      Pair grad_conv = simd::zero_pair();
      if (!mask || !mask[t]) {
        const Pair c = simd::load(at);
        grad_conv = simd::load_some(grad, count);
        simd::silu_gradient<1>(&c, &grad_conv, &grad_conv);
      }
      simd::store(at, grad_conv);
      if (t % kTilePairs == 0) ahead.work();
    }
  }

  // S' += gc' n
  template <int kTaps>
  EHC_SIMD void sum_tap_gradients(const Tile& tile, int64_t end) const {
    const GradRun& r = tile.r;
    const int64_t step = conv_.dilation * kPair, taps = conv_.taps, begin = r.run.begin;
    const float* normal = normals_ + tile_row(r, begin);
    const float* at = grad_conv_ + tile_row(r, begin);
    const uint8_t* mask = source_.value.mask;
    const int64_t length = end - begin;
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

  // gg' and its products with n for the tokens from `begin` on that the run finishes.
  template <int kTaps>
  EHC_SIMD void spread(const Tile& tile, int64_t begin) {
    const GradRun& r = tile.r;
    const int64_t step = conv_.dilation * kPair, row_step = weights_.row;
    const int64_t taps = conv_.taps, done = begin - r.final_begin;
    const float* normal = normals_ + tile_row(r, begin);
    const float* grad_conv = grad_conv_ + tile_row(r, begin);
    float* to = rows_ + done * row_step + tile.column;
    float* product = sums_ + done * kConvTileColumns;
    Pair tap[kTaps + 1];
    for (int k = 0; k < kTaps; ++k) tap[k] = tile.tap(k);
    for (int64_t t = done; t < r.final_end - r.final_begin; ++t) {
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
  bool walks_ = false;
  float *normals_, *grad_conv_, *rows_, *sums_, *carry_;
  int16_t first_tap_[2 * kConvTileHistory];
  int16_t seen_[3 * kConvTileHistory];
};

}  // namespace
}  // namespace ehc::engram::EHC_ISA
