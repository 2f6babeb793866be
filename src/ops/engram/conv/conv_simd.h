// Vector steps of the short convolution, shared by the convolution and the whole layer.
#pragma once

#include "backends/cpu/simd.h"
#include "ops/engram/conv/conv_args.h"
#include "ops/engram/conv/conv_math.h"
#include "ops/engram/shared/walk_ahead_simd.h"

namespace ehc::engram::EHC_ISA {
namespace {

namespace simd = ehc::simd::EHC_ISA;
using simd::kPair;
using simd::Pair;

// Prepared weights, one fp32 row per (tap, stream), then the norm weights; lanes in A's order.
struct PreparedWeights {
  const float* data;
  int64_t taps, streams, row;
  EHC_SIMD const float* tap(int64_t k, int64_t stream) const {
    return data + (k * streams + stream) * row;
  }
  EHC_SIMD const float* norm(int64_t stream) const { return tap(taps, stream); }
};

EHC_SIMD PreparedWeights prepared_weights(const ShortConv& conv, int64_t streams, int64_t hidden) {
  return {conv.prepared, conv.taps, streams, conv_prepared_row(hidden)};
}

// One row: elements `step` apart, widened, in A's order, filled up with zeros.
template <class A, class W>
inline void prepare_row(const W* from, int64_t step, int64_t hidden, float* to) {
  for (int64_t i = 0; i < hidden; i += kPair) {
    float natural[kPair];
    for (int j = 0; j < kPair; ++j) {
      natural[j] = i + j < hidden ? simd::widen(from[(i + j) * step]) : 0.0f;
    }
    simd::store(to + i, simd::load_f32<A>(natural));
  }
}

template <class A>
inline void prepare_row(const void* weights, DType type, int64_t first, int64_t step,
                        int64_t hidden, float* to) {
  if (type == DType::bf16) {
    prepare_row<A>(static_cast<const simd::Bf16*>(weights) + first, step, hidden, to);
  } else {
    prepare_row<A>(static_cast<const float*>(weights) + first, step, hidden, to);
  }
}

template <class A>
inline void prepare_streams(const ShortConv& conv, int64_t streams, int64_t hidden, int64_t begin,
                            int64_t end) {
  const int64_t row = conv_prepared_row(hidden);
  for (int64_t h = begin; h < end; ++h) {
    for (int64_t k = 0; k < conv.taps; ++k) {
      prepare_row<A>(conv.conv_weight, conv.weight, h * conv.conv_weight_stream_stride + k,
                     conv.conv_weight_channel_stride, hidden,
                     conv.prepared + (k * streams + h) * row);
    }
    prepare_row<A>(conv.norm_weight, conv.norm_weight_type, h * conv.norm_weight_stream_stride, 1,
                   hidden, conv.prepared + (conv.taps * streams + h) * row);
  }
}

// u = (value * scale) * norm weight
EHC_SIMD Pair normalise(Pair value, float scale, const float* norm) {
  return mul(mul(value, simd::splat(scale)), simd::load(norm));
}

// Where u comes from: values[p,h,:] and scale[p,h]; zero for image tokens, which are not read.
template <class A>
struct ConvSource {
  const A* values;
  int64_t token_stride, stream_stride;
  const float* scale;  // [tokens from first_token on, n]
  int64_t first_token, streams;
  const uint8_t* mask;

  EHC_SIMD const A* row(int64_t token, int64_t stream) const {
    return values + token * token_stride + stream * stream_stride;
  }
  EHC_SIMD int64_t at(int64_t token, int64_t stream) const {
    return (token - first_token) * streams + stream;
  }
  EHC_SIMD float scale_of(int64_t token, int64_t stream) const { return scale[at(token, stream)]; }
  EHC_SIMD bool masked(int64_t token) const { return mask && mask[token]; }
};

// 1 / RMS of the rows of a source, for WalkAhead.
template <class A>
struct NormRow {
  const ConvSource<A>& source;
  float* scale;  // as source.scale
  int64_t hidden;
  float eps;
  const A* row = nullptr;
  float* rstd = nullptr;
  Pair sum{};

  void open(int64_t token, int64_t stream) {
    row = source.row(token, stream);
    rstd = scale + source.at(token, stream);
    sum = simd::zero_pair();
  }
  EHC_SIMD void add(int64_t column, int64_t count) {
    simd::prefetch(row + column + kFarAhead);
    sum = simd::add_squares(sum, row + column, count);
  }
  void close() const { *rstd = reciprocal_rms(simd::square_sum(sum, row, hidden), hidden, eps); }
};

// A run of tokens [begin, end) of the sequence that starts at `start`.
struct ConvRun {
  int64_t begin, end, sequence, start;
};

// Finds the sequences of a range of tokens, in order.
class RunCursor {
 public:
  RunCursor(const ShortConv& conv, int64_t begin, int64_t end)
      : conv_(conv), token_(begin), end_(end) {
    if (!conv.cu_seqlens) return;
    int64_t low = 0, high = conv.sequences;  // the last sequence that starts at or before begin
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (conv.cu_seqlens[middle] <= begin ? low : high) = middle;
    }
    sequence_ = low;
  }
  // The next run of at most `limit` tokens; empty at the end.
  EHC_SIMD ConvRun next(int64_t limit) {
    ConvRun run = {token_, end_, sequence_, 0};
    if (conv_.cu_seqlens && token_ < end_) {
      while (conv_.cu_seqlens[sequence_ + 1] <= token_) ++sequence_;
      run.sequence = sequence_;
      run.start = conv_.cu_seqlens[sequence_];
      const int64_t stop = conv_.cu_seqlens[sequence_ + 1];
      run.end = stop < end_ ? stop : end_;
    }
    if (run.end > run.begin + limit) run.end = run.begin + limit;
    token_ = run.end;
    return run;
  }

 private:
  const ShortConv& conv_;
  int64_t token_, end_, sequence_ = 0;
};

EHC_SIMD const float* state_row(const ShortConv& conv, const ConvState& state, const ConvRun& run,
                                int64_t token, int64_t stream) {
  const int64_t position = token - run.start + conv_history(conv.taps, conv.dilation);
  return state.data + run.sequence * state.sequence_stride + position * state.position_stride +
         stream * state.stream_stride;
}

// u[token], which may lie in the state, before the start of the sequence.
template <class A>
EHC_SIMD Pair conv_input(const ShortConv& conv, const ConvSource<A>& source, const ConvRun& run,
                         int64_t token, int64_t stream, const float* norm, int64_t column,
                         int64_t count) {
  if (token < run.start) {
    return simd::load_f32_some<A>(state_row(conv, conv.state, run, token, stream) + column, count);
  }
  if (source.masked(token)) return simd::zero_pair();
  return normalise(simd::load_some(source.row(token, stream) + column, count),
                   source.scale_of(token, stream), norm + column);
}

EHC_SIMD int64_t first_tap(const ShortConv& conv, const ConvRun& run, int64_t token) {
  return conv.state.data ? 0 : conv_first_tap(conv.taps, conv.dilation, token - run.start);
}

// c for one token, its taps fetched one by one: any number of taps and any dilation.
template <class A>
EHC_SIMD Pair convolve_directly(const ShortConv& conv, const ConvSource<A>& source,
                                const PreparedWeights& weights, const ConvRun& run, int64_t token,
                                int64_t stream, int64_t column, int64_t count) {
  Pair c = simd::zero_pair();
  for (int64_t k = first_tap(conv, run, token); k < conv.taps; ++k) {
    const int64_t from = token - conv_lag(conv.taps, conv.dilation, k);
    c = fma(simd::load(weights.tap(k, stream) + column),
            conv_input(conv, source, run, from, stream, weights.norm(stream), column, count), c);
  }
  return c;
}

inline constexpr int kTilePairs = simd::kPairsTogether;
inline constexpr int kTileColumns = kTilePairs * kPair;
inline constexpr int kTileRows = 48;

// Tokens of a run: the rows of two of them (token_bytes each: of this run those that are used
// again, of the next all) take half of a second-level cache of 2 MiB, and with their history they
// fit in a tile where that can be.
EHC_SIMD int64_t run_limit(const ShortConv& conv, int64_t token_bytes) {
  const int64_t room = kTileRows - conv_history(conv.taps, conv.dilation);
  const int64_t most = room >= 8 ? room : 32;
  const int64_t tokens = (int64_t{1} << 20) / token_bytes;
  return tokens < 8 ? 8 : tokens > most ? most : tokens;
}

// u of the history and the tokens of a run, for one tile of columns of one stream. Row r belongs to
// token run.begin - history + r, so tap k of token t reads row t - run.begin + k * dilation.
class ConvTile {
 public:
  // A run is worth a tile when it is longer than a token and its history fits.
  EHC_SIMD static bool fits(const ShortConv& conv, const ConvRun& run) {
    const int64_t tokens = run.end - run.begin;
    return tokens > 1 && conv_history(conv.taps, conv.dilation) + tokens <= kTileRows;
  }

  ConvTile(const ShortConv& conv, const ConvRun& run)
      : conv_(conv),
        run_(run),
        history_(conv_history(conv.taps, conv.dilation)),
        tokens_(run.end - run.begin) {
    for (int64_t r = 0; r < history_; ++r) {
      // history_ is a multiple of dilation: no token reads a row of a residue that none of them
      // has.
      const bool before = run.begin - history_ + r < run.start;
      used_[r] = r % conv.dilation < tokens_ && (!before || conv.state.data);
    }
    for (int64_t t = 0; t < tokens_; ++t) {
      first_tap_[t] = static_cast<int32_t>(first_tap(conv, run, run.begin + t));
    }
  }

  // Finishes kPairs pairs of columns from `column` on, of which the last holds `count` columns, for
  // the tokens of the run that are not masked.
  template <int kPairs, class A, class Output, class Ahead>
  EHC_SIMD void finish(const ConvSource<A>& source, const PreparedWeights& weights, int64_t stream,
                       int64_t column, int64_t count, Output& output, Ahead& ahead) {
    fill_history<kPairs>(source, weights.norm(stream), stream, column, count);
    if (conv_.taps == 4) {
      finish_tokens<kPairs, true>(source, weights, stream, column, count, output, ahead);
    } else {
      finish_tokens<kPairs, false>(source, weights, stream, column, count, output, ahead);
    }
  }

 private:
  template <int kPairs, class A>
  EHC_SIMD void fill_history(const ConvSource<A>& source, const float* norm, int64_t stream,
                             int64_t column, int64_t count) {
    for (int64_t r = 0; r < history_; ++r) {
      if (!used_[r]) continue;
      const int64_t token = run_.begin - history_ + r;
      for (int p = 0; p < kPairs; ++p) {
        simd::store(row(r) + p * kPair,
                    conv_input(conv_, source, run_, token, stream, norm, column + p * kPair,
                               p + 1 < kPairs ? kPair : count));
      }
    }
  }

  template <int kPairs, bool kFourTaps, class A, class Output, class Ahead>
  EHC_SIMD void finish_tokens(const ConvSource<A>& source, const PreparedWeights& weights,
                              int64_t stream, int64_t column, int64_t count, Output& output,
                              Ahead& ahead) {
    const float* norm = weights.norm(stream) + column;
    const float* taps = weights.tap(0, stream) + column;
    const int64_t tap_step = weights.streams * weights.row;
    for (int64_t t = 0; t < tokens_; ++t) {
      const int64_t token = run_.begin + t;
      float* u = row(t + history_);
      Pair value[kPairs], c[kPairs];
      if (source.masked(token)) {
        for (int p = 0; p < kPairs; ++p) simd::store(u + p * kPair, simd::zero_pair());
        continue;
      }
      const A* in = source.row(token, stream) + column;
      const float scale = source.scale_of(token, stream);
      for (int p = 0; p < kPairs; ++p) {
        value[p] = simd::load_some(in + p * kPair, p + 1 < kPairs ? kPair : count);
        simd::prefetch_near(in + p * kPair + kTileColumns);
        simd::store(u + p * kPair, normalise(value[p], scale, norm + p * kPair));
      }
      sum_taps<kPairs, kFourTaps>(taps, tap_step, t, c);
      output.template finish<kPairs>(token, stream, column, count, value, c);
      ahead.work();
    }
  }

  // c, from the oldest tap on.
  template <int kPairs, bool kFourTaps>
  EHC_SIMD void sum_taps(const float* taps, int64_t tap_step, int64_t t, Pair* c) const {
    const int64_t row_step = conv_.dilation * kTileColumns;
    const float* u = u_ + t * kTileColumns;
    const auto add_tap = [&](int64_t k) EHC_SIMD_LAMBDA {
      for (int p = 0; p < kPairs; ++p) {
        c[p] = fma(simd::load(taps + k * tap_step + p * kPair),
                   simd::load(u + k * row_step + p * kPair), c[p]);
      }
    };
    for (int p = 0; p < kPairs; ++p) c[p] = simd::zero_pair();
    const int64_t first = first_tap_[t];
    if (kFourTaps && first == 0) {
      for (int k = 0; k < 4; ++k) add_tap(k);
    } else {
      for (int64_t k = first; k < conv_.taps; ++k) add_tap(k);
    }
  }

  EHC_SIMD float* row(int64_t r) { return u_ + r * kTileColumns; }

  const ShortConv& conv_;
  const ConvRun& run_;
  int64_t history_, tokens_;
  bool used_[kTileRows];
  int32_t first_tap_[kTileRows];
  alignas(64) float u_[kTileRows * kTileColumns];
};

// A run for all streams; `ahead.work()` is called between.
template <class A, class Output, class Ahead>
inline void convolve_run(const ShortConv& conv, const ConvSource<A>& source,
                         const PreparedWeights& weights, const ConvRun& run, int64_t hidden,
                         Output& output, Ahead& ahead) {
  if (!ConvTile::fits(conv, run)) {
    for (int64_t t = run.begin; t < run.end; ++t) {
      if (source.masked(t)) continue;
      for (int64_t h = 0; h < source.streams; ++h) {
        for (int64_t i = 0; i < hidden; i += kPair) {
          const Pair value = simd::load_some(source.row(t, h) + i, hidden - i);
          const Pair c = convolve_directly(conv, source, weights, run, t, h, i, hidden - i);
          output.template finish<1>(t, h, i, hidden - i, &value, &c);
        }
      }
    }
    return;
  }
  ConvTile tile(conv, run);
  for (int64_t h = 0; h < source.streams; ++h) {
    int64_t i = 0;
    for (; i + kTileColumns <= hidden; i += kTileColumns) {
      tile.template finish<kTilePairs>(source, weights, h, i, kPair, output, ahead);
    }
    for (; i < hidden; i += kPair) {
      tile.template finish<1>(source, weights, h, i, hidden - i, output, ahead);
    }
  }
}

// Tokens [begin, end), run after run. `ahead` is a WalkAhead that fills source.scale, one run
// before it is read; `token_bytes` are those of all rows of a token. Output has
//   finish<kPairs>(token, stream, column, count, value, c)  writes pairs of columns from `column`
//                                                on, of which the last has `count` columns
//   image_token(token)                           writes one
//   streaming                                    whether its stores go past the caches
template <class A, class Output, class Ahead>
inline void convolve_range(const ShortConv& conv, const ConvSource<A>& source, int64_t hidden,
                           int64_t begin, int64_t end, int64_t token_bytes, Output& output,
                           Ahead& ahead) {
  const PreparedWeights weights = prepared_weights(conv, source.streams, hidden);
  const int64_t limit = run_limit(conv, token_bytes);
  ahead.open(source.first_token, begin);
  ahead.finish();
  RunCursor cursor(conv, begin, end);
  ConvRun run = cursor.next(limit);
  ahead.open(run.begin, run.end);
  while (run.begin < run.end) {
    ahead.finish();
    const ConvRun next = cursor.next(limit);
    ahead.open(next.begin, next.end);
    for (int64_t t = run.begin; t < run.end; ++t) {
      if (source.masked(t)) output.image_token(t);
    }
    convolve_run(conv, source, weights, run, hidden, output, ahead);
    run = next;
  }
  if (output.streaming) simd::stream_fence();
}

}  // namespace
}  // namespace ehc::engram::EHC_ISA
