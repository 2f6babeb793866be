// engram.conv_fwd on SIMD lanes.
//
//   Y = V + silu(c), c[t] = sum_k W[k] * u[t - (w-1-k)*dilation], u = RMSNorm_h(V) * g
//   V, Y A[T,n,d]; state F32[B,(w-1)*dilation,n,d] holds u before the chunk, oldest first
//
// Bytes: 4nd a token in 16-bit types: V read once, Y written once.
// Algorithm: runs of tokens whose rows fit in the second-level cache. For each stream tiles of
// columns: u of the history of a run, then token by token u, taps, SiLU and output, while the norms
// of the next run are taken piece by piece, in the order of memory, which also fetches its rows.
// Norms of the history of a range are recomputed. Class R per implementation, batch-invariant:
// lanes depend on the column alone, and taps are added oldest first.
#include "ops/engram/conv/conv_simd.h"

namespace ehc::engram::EHC_ISA {
namespace {

template <class A>
EHC_SIMD const A* value_row(const ConvForwardArgs& args, int64_t token, int64_t stream) {
  return static_cast<const A*>(args.gated_value) + token * args.value_token_stride +
         stream * args.value_stream_stride;
}

template <class A>
EHC_SIMD A* out_row(const ConvForwardArgs& args, int64_t token, int64_t stream) {
  return static_cast<A*>(args.out) + token * args.out_token_stride +
         stream * args.out_stream_stride;
}

EHC_SIMD bool masked(const ConvForwardArgs& args, int64_t token) {
  return args.image_token_mask && args.image_token_mask[token];
}

template <class A>
inline float value_rstd(const ConvForwardArgs& args, int64_t token, int64_t stream) {
  const float squares = simd::square_sum(value_row<A>(args, token, stream), args.hidden);
  return reciprocal_rms(squares, args.hidden, args.conv.eps);
}

// Norms of the rows of tokens in order, a piece of a row at a time.
template <class A>
class NormsAhead {
 public:
  NormsAhead(const ConvForwardArgs& args, int64_t first, float* scale)
      : args_(args), first_(first), scale_(scale) {}

  void open(int64_t begin, int64_t end) {
    token_ = begin;
    end_ = end;
    next_row();
  }
  EHC_SIMD void work() {
    if (token_ == end_) return;
    for (int p = 0; p < kTilePairs && column_ < args_.hidden; ++p, column_ += kPair) {
      simd::prefetch(row_ + column_ + kFarAhead);
      sum_ = simd::add_squares(sum_, row_ + column_, args_.hidden - column_);
    }
    if (column_ >= args_.hidden) close_row();
  }
  void finish() {
    while (token_ != end_) work();
  }

 private:
  // Elements between what is read and what is prefetched.
  static constexpr int64_t kFarAhead = 4096;

  void close_row() {
    scale_[(token_ - first_) * args_.streams + stream_] =
        reciprocal_rms(simd::square_sum(sum_, row_, args_.hidden), args_.hidden, args_.conv.eps);
    if (++stream_ == args_.streams) {
      stream_ = 0;
      ++token_;
    }
    next_row();
  }
  void next_row() {
    while (token_ != end_ && masked(args_, token_)) ++token_;
    if (token_ == end_) return;
    row_ = value_row<A>(args_, token_, stream_);
    column_ = 0;
    sum_ = simd::zero_pair();
  }

  const ConvForwardArgs& args_;
  int64_t first_;
  float* scale_;
  int64_t token_ = 0, end_ = 0, stream_ = 0, column_ = 0;
  const A* row_ = nullptr;
  Pair sum_;
};

template <class A>
struct ConvOutput {
  const ConvForwardArgs& args;
  NormsAhead<A>& ahead;
  bool streaming;

  template <int kPairs>
  EHC_SIMD void finish(int64_t token, int64_t stream, int64_t column, int64_t count,
                       const Pair* value, const Pair* c) {
    Pair y[kPairs];
    for (int p = 0; p < kPairs; ++p) y[p] = value[p];
    simd::add_silu<kPairs>(c, y);
    A* out = out_row<A>(args, token, stream) + column;
    for (int p = 0; p < kPairs; ++p) {
      simd::store_some(out + p * kPair, y[p], p + 1 < kPairs ? kPair : count, streaming);
    }
  }
  EHC_SIMD void work_ahead() { ahead.work(); }
};

template <class A>
inline void conv_range(const ConvForwardArgs& args, int64_t begin, int64_t end, float* scratch) {
  const int64_t history = conv_history(args.conv.taps, args.conv.dilation);
  const int64_t first = history < begin ? begin - history : 0;
  const ConvSource<A> source = {static_cast<const A*>(args.gated_value),
                                args.value_token_stride,
                                args.value_stream_stride,
                                scratch,
                                first,
                                args.streams,
                                args.image_token_mask};
  const auto row_bytes = static_cast<int64_t>(sizeof(A)) * args.hidden;
  const bool streaming = args.streaming && simd::can_stream(args.out) &&
                         args.out_token_stride * sizeof(A) % 64 == 0 &&
                         args.out_stream_stride * sizeof(A) % 64 == 0;
  const int64_t limit = run_limit(args.conv, 2 * args.streams * row_bytes);
  const PreparedWeights weights = prepared_weights(args.conv, args.streams, args.hidden);
  NormsAhead<A> norms(args, first, scratch);
  norms.open(first, begin);
  norms.finish();

  RunCursor cursor(args.conv, begin, end);
  ConvRun run = cursor.next(limit);
  norms.open(run.begin, run.end);
  ConvOutput<A> output = {args, norms, streaming};
  while (run.begin < run.end) {
    norms.finish();
    const ConvRun next = cursor.next(limit);
    norms.open(next.begin, next.end);
    for (int64_t t = run.begin; t < run.end; ++t) {
      if (!masked(args, t)) continue;
      for (int64_t h = 0; h < args.streams; ++h) {
        std::memset(out_row<A>(args, t, h), 0, static_cast<size_t>(row_bytes));
      }
    }
    convolve_run(args.conv, source, weights, run, args.streams, args.hidden, output);
    run = next;
  }
  if (streaming) simd::stream_fence();
}

}  // namespace

void conv_prepare(const ConvForwardArgs& args, int64_t begin, int64_t end) {
  simd::with_activation(args.activation, [&](auto a) {
    prepare_streams<decltype(a)>(args.conv, args.streams, args.hidden, begin, end);
  });
}

void conv_fwd_rows(const ConvForwardArgs& args, int64_t begin, int64_t end, float* scratch) {
  simd::with_activation(args.activation,
                        [&](auto a) { conv_range<decltype(a)>(args, begin, end, scratch); });
}

void conv_state_rows(const ConvForwardArgs& args, int64_t begin, int64_t end) {
  simd::with_activation(args.activation, [&](auto a) {
    using A = decltype(a);
    for (int64_t sequence = begin; sequence < end; ++sequence) {
      next_state<A>(args.conv, {args.streams, args.hidden, args.tokens, args.image_token_mask},
                    static_cast<const A*>(args.gated_value), args.value_token_stride,
                    args.value_stream_stride, sequence,
                    [&](int64_t t, int64_t h) { return value_rstd<A>(args, t, h); });
    }
  });
}

}  // namespace ehc::engram::EHC_ISA
