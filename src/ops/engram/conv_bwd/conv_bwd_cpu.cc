// engram.conv_bwd on SIMD lanes.
//
//   gc = G silu'(c), gu[t] = sum_j W[w-1-j] gc[t + j*dilation], gV = G + r (g gu - n mean(g gu n))
//   S[w-1-j] = sum_t gc[t] n[t - j*dilation], gW[k] = g S[k], gg = sum_k W[k] S[k]     n = V r
//   V, G, gV A[T,n,d]; partial sums S F32[P,n,w,d], P a function of T
//
// Bytes: 6nd a token in 16-bit types: V, G read once, gV written once.
// Algorithm: a chunk of tokens and a stream at a time, in runs whose rows fit in the second-level
// cache; tiles of columns (conv_bwd_simd.h) leave g gu of the tokens that are final, whose rows are
// then written. While the tiles compute, the norms of the next run are taken, which also fetches
// its rows. Norms and gc of (w-1)*dilation tokens around a chunk are computed twice. Class R per
// implementation; rows of gV are batch-invariant: lanes depend on the column alone, and sums over
// taps have a fixed order.
#include "ops/engram/conv_bwd/conv_bwd_simd.h"

namespace ehc::engram::EHC_ISA {
namespace {

template <class A>
EHC_SIMD A* grad_value_row(const ConvBackwardArgs& args, int64_t token, int64_t stream) {
  return static_cast<A*>(args.grad_value) + token * args.grad_value_token_stride +
         stream * args.grad_value_stream_stride;
}

// Norms of the rows of a stream in order, a piece of a row at a time; fetches rows of G beside
// them.
template <class A>
class RowsAhead {
 public:
  RowsAhead(const ConvGradSource<A>& source, int64_t hidden, float eps, float* scale)
      : source_(source), scale_(scale), hidden_(hidden), eps_(eps) {}

  void open(int64_t begin, int64_t end, int64_t stream) {
    token_ = begin;
    end_ = end;
    stream_ = stream;
    next_row();
  }
  EHC_SIMD void work() {
    if (token_ == end_) return;
    const int64_t left = hidden_ - column_;
    const A *row = row_ + column_, *grad = grad_ + column_;
    Pair sum = sum_;
    if (left >= kTileColumns) {
      for (int p = 0; p < kTilePairs; ++p) {
        simd::prefetch(grad + p * kPair);
        simd::prefetch(row + p * kPair + source_.value.token_stride);
        sum = simd::add_squares(sum, row + p * kPair, kPair);
      }
    } else {
      for (int64_t i = 0; i < left; i += kPair) {
        simd::prefetch(grad + i);
        sum = simd::add_squares(sum, row + i, left - i);
      }
    }
    sum_ = sum;
    column_ += kTileColumns;
    if (left <= kTileColumns) close_row();
  }
  void finish() {
    while (token_ != end_) work();
  }

 private:
  void close_row() {
    scale_[token_ - source_.value.first_token] =
        reciprocal_rms(simd::square_sum(sum_, row_, hidden_), hidden_, eps_);
    ++token_;
    next_row();
  }
  void next_row() {
    while (token_ != end_ && source_.value.masked(token_)) ++token_;
    if (token_ == end_) return;
    row_ = source_.value.row(token_, stream_);
    grad_ = source_.grad_row(token_, stream_);
    column_ = 0;
    sum_ = simd::zero_pair();
  }

  const ConvGradSource<A>& source_;
  float* scale_;
  int64_t hidden_;
  float eps_;
  int64_t token_ = 0, end_ = 0, stream_ = 0, column_ = 0;
  const A *row_ = nullptr, *grad_ = nullptr;
  Pair sum_;
};

// gV of the tokens that a run finishes.
template <class A>
inline void write_rows(const ConvBackwardArgs& args, const ConvGradSource<A>& source,
                       ConvGradient<A>& gradient, const GradRun& r, int64_t stream,
                       bool streaming) {
  const int64_t hidden = args.forward.hidden;
  for (int64_t t = r.final_begin; t < r.final_end; ++t) {
    A* out = grad_value_row<A>(args, t, stream);
    if (source.value.masked(t)) {
      std::memset(out, 0, static_cast<size_t>(hidden) * sizeof(A));
      continue;
    }
    const A* grad = source.grad_row(t, stream);
    const float* row = gradient.row(r, t);
    const simd::Vec rstd = simd::splat(source.value.scale_of(t, stream) * kUnfold);
    const A* value = source.value.row(t, stream);
    const simd::Vec pull = simd::splat(-gradient.mean(r, t) * source.value.scale_of(t, stream));
    for (int64_t i = 0; i < hidden; i += kPair) {
      const int64_t count = hidden - i;
      const Pair inner = fma(pull, simd::load_some(value + i, count), simd::load(row + i));
      simd::store_some(out + i, fma(rstd, inner, simd::load_some(grad + i, count)), count,
                       streaming);
    }
  }
}

template <class A>
inline void backward_item(const ConvBackwardArgs& args, int64_t item, float* scratch) {
  const ConvForwardArgs& f = args.forward;
  const int64_t stream = item % f.streams, size = conv_bwd_chunk(f.tokens);
  const int64_t begin = item / f.streams * size;
  const int64_t end = begin + size < f.tokens ? begin + size : f.tokens;
  const int64_t history = conv_history(f.conv.taps, f.conv.dilation);
  const int64_t first = history < begin ? begin - history : 0;

  const PreparedWeights weights = prepared_weights(f.conv, f.streams, f.hidden);
  const PartialRows partials = {args.sums.partials.of(item / f.streams, stream), weights.row};
  std::memset(partials.data, 0,
              static_cast<size_t>(args.sums.partials.stream_floats()) * sizeof(float));

  const int64_t token_bytes = conv_bwd_token_bytes(f.hidden, sizeof(A));
  const int64_t limit = conv_bwd_run(history, token_bytes);
  float* scale = scratch + conv_gradient_sizes(history, limit, 1, f.hidden).floats(weights.row);
  // One stream: scales lie one behind the other.
  ConvGradSource<A> source = {{static_cast<const A*>(f.gated_value), f.value_token_stride,
                               f.value_stream_stride, scale, first, 1, f.image_token_mask},
                              static_cast<const A*>(args.grad_out),
                              args.grad_token_stride,
                              args.grad_stream_stride};
  source.value.scale -= stream;
  ConvGradient<A> gradient(f.conv, source, weights, f.hidden, limit, 1, scratch);
  const bool streaming =
      f.streaming && simd::rows_can_stream<A>(args.grad_value, args.grad_value_token_stride,
                                              args.grad_value_stream_stride);
  RowsAhead<A> ahead(source, f.hidden, f.conv.eps, scale);

  if (conv_bwd_in_tiles(history)) {
    ahead.open(first, begin, stream);
    ahead.finish();
    GradCursor cursor(f.conv, f.tokens, begin, end, limit);
    GradRun run = cursor.next();
    ahead.open(run.run.begin, run.run.end, stream);
    while (run.run.begin < run.run.end) {
      ahead.finish();
      const GradRun next = cursor.next();
      ahead.open(next.run.begin, next.run.end, stream);
      gradient.run(run, stream, 0, partials, ahead);
      write_rows(args, source, gradient, run, stream, streaming);
      run = next;
    }
  } else {
    ahead.open(first, history < f.tokens - end ? end + history : f.tokens, stream);
    ahead.finish();
    TokenCursor cursor(f.conv, f.tokens, begin, end);
    for (int64_t t = begin; t < end; ++t) {
      const GradRun r = cursor.next();
      if (!source.value.masked(t)) gradient.token(r, stream, partials);
      write_rows(args, source, gradient, r, stream, streaming);
    }
  }
  if (streaming) simd::stream_fence();
}

// Adds a pair of columns of a gradient, element by element, to its target.
template <class A>
inline void put_sum(const ConvWeightGradient& gradient, int64_t stream, int64_t column,
                    int64_t count, int64_t tap, Pair sum, bool any) {
  float natural[kPair];
  simd::store(natural, simd::natural_order<A>(sum));
  float* out = gradient.data + stream * gradient.stream_stride + tap;
  const float* target = gradient.target;
  if (target) target += stream * gradient.target_stream_stride + tap;
  for (int64_t j = 0; j < kPair && j < count; ++j) {
    float& to = out[(column + j) * gradient.channel_stride];
    if (!target) {
      to = natural[j];
    } else {
      const float old = target[(column + j) * gradient.target_channel_stride];
      to = any ? old + natural[j] : old;
    }
  }
}

// gW[k] = g S[k] and gg = sum_k W[k] S[k] of a pair of columns.
template <class A>
inline void sum_columns(const ConvSumArgs& args, int64_t stream, int64_t column) {
  const ConvPartials& partials = args.partials;
  const PreparedWeights weights = {args.prepared, partials.taps, partials.streams, partials.row};
  const int64_t count = args.hidden - column;
  const bool any = partials.chunks > 0;
  const Pair norm = simd::load(weights.norm(stream) + column);
  Pair of_norm = simd::zero_pair();
  for (int64_t k = 0; k < partials.taps; ++k) {
    Pair sum = simd::zero_pair();
    for (int64_t chunk = 0; chunk < partials.chunks; ++chunk) {
      sum = add(sum, simd::load(partials.of(chunk, stream) + k * partials.row + column));
    }
    sum = mul(sum, simd::splat(kLn2));
    of_norm = fma(simd::load(weights.tap(k, stream) + column), sum, of_norm);
    put_sum<A>(args.of_taps, stream, column, count, k, mul(norm, sum), any);
  }
  put_sum<A>(args.of_norm, stream, column, count, 0, of_norm, any);
}

// Taps times norm weight and log2(e), behind the rows of conv_prepare.
template <class A>
inline void fold_norm_weight(const ConvForwardArgs& args, int64_t stream) {
  const ShortConv& conv = args.conv;
  const int64_t row = conv_prepared_row(args.hidden);
  const PreparedWeights weights = prepared_weights(conv, args.streams, args.hidden);
  for (int64_t k = 0; k < conv.taps; ++k) {
    float* to = conv.prepared + ((conv.taps + 1 + k) * args.streams + stream) * row;
    for (int64_t i = 0; i < row; i += kPair) {
      const Pair norm = mul(simd::load(weights.norm(stream) + i), simd::splat(kLog2e));
      simd::store(to + i, mul(simd::load(weights.tap(k, stream) + i), norm));
    }
  }
}

}  // namespace

void conv_bwd_prepare(const ConvForwardArgs& args, int64_t begin, int64_t end) {
  simd::with_activation(args.activation, [&](auto a) {
    prepare_streams<decltype(a)>(args.conv, args.streams, args.hidden, begin, end);
    for (int64_t h = begin; h < end; ++h) fold_norm_weight<decltype(a)>(args, h);
  });
}

void conv_bwd_items(const ConvBackwardArgs& args, int64_t begin, int64_t end, float* scratch) {
  simd::with_activation(args.forward.activation, [&](auto a) {
    for (int64_t item = begin; item < end; ++item) backward_item<decltype(a)>(args, item, scratch);
  });
}

void conv_bwd_sums(const ConvSumArgs& args, int64_t begin, int64_t end) {
  const int64_t blocks = conv_sum_blocks(args.hidden);
  simd::with_activation(args.activation, [&](auto a) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b % blocks * kConvTileColumns;
      for (int64_t i = first; i < first + kConvTileColumns && i < args.hidden; i += kPair) {
        sum_columns<decltype(a)>(args, b / blocks, i);
      }
    }
  });
}

}  // namespace ehc::engram::EHC_ISA
