// engram.conv_fwd on SIMD lanes.
//
//   Y = V + silu(c), c[t] = sum_k W[k] * u[t - (w-1-k)*dilation], u = RMSNorm_h(V) * g
//   V, Y A[T,n,d]; state F32[B,(w-1)*dilation,n,d] holds u before the chunk, oldest first
//
// Bytes: 4nd a token in 16-bit types: V read once, Y written once.
// Algorithm: runs of tokens whose rows fit in the second-level cache. First the norms of all rows
// of a run, then for each stream tiles of columns: u of the run and of its history, kept in the
// first-level cache, then taps and SiLU token by token while the rows of the next run are
// prefetched. Norms of the history of a range are recomputed. Class R per implementation,
// batch-invariant: lanes depend on the column alone, and taps are added oldest first.
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
  const A* row = value_row<A>(args, token, stream);
  Pair sum = simd::zero_pair(), more = simd::zero_pair();
  int64_t i = 0;
  for (; i + 2 * kPair <= args.hidden; i += 2 * kPair) {
    const Pair v = simd::load(row + i), w = simd::load(row + i + kPair);
    sum = fma(v, v, sum);
    more = fma(w, w, more);
  }
  for (; i < args.hidden; i += kPair) {
    const Pair v = simd::load_some(row + i, args.hidden - i);
    sum = fma(v, v, sum);
  }
  return reciprocal_rms(reduce_add(add(sum, more)), args.hidden, args.conv.eps);
}

template <class A>
inline void norms(const ConvForwardArgs& args, int64_t begin, int64_t end, int64_t first,
                  float* scale) {
  for (int64_t t = begin; t < end; ++t) {
    if (masked(args, t)) continue;
    for (int64_t h = 0; h < args.streams; ++h) {
      scale[(t - first) * args.streams + h] = value_rstd<A>(args, t, h);
    }
  }
}

template <class A, bool kStreaming>
inline void conv_run(const ConvForwardArgs& args, const ConvSource<A>& source, const ConvRun& run,
                     int64_t ahead) {
  const auto finish = [&](int64_t t, int64_t h) EHC_SIMD_LAMBDA {
    const A* value = value_row<A>(args, t, h);
    A* out = out_row<A>(args, t, h);
    const bool zero = masked(args, t);
    return [=]<int kPairs>(int64_t column, int64_t count, const Pair* activation) EHC_SIMD_LAMBDA {
      for (int p = 0; p < kPairs; ++p, column += kPair) {
        const int64_t columns = p + 1 < kPairs ? kPair : count;
        simd::prefetch(value + column + ahead);
        const Pair y =
            zero ? simd::zero_pair() : add(simd::load_some(value + column, columns), activation[p]);
        simd::store_some(out + column, y, columns, kStreaming);
      }
    };
  };
  convolve_run(args.conv, source, prepared_weights(args.conv, args.streams, args.hidden), run,
               args.streams, args.hidden, finish);
}

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
  const bool streaming = args.streaming && simd::can_stream(args.out) &&
                         args.out_token_stride * sizeof(A) % 64 == 0 &&
                         args.out_stream_stride * sizeof(A) % 64 == 0;
  const int64_t limit =
      run_limit(args.conv, 2 * args.streams * args.hidden * static_cast<int64_t>(sizeof(A)));
  norms<A>(args, first, begin, first, scratch);
  RunCursor cursor(args.conv, begin, end);
  for (ConvRun run = cursor.next(limit); run.begin < run.end; run = cursor.next(limit)) {
    norms<A>(args, run.begin, run.end, first, scratch);
    const int64_t tokens = run.end - run.begin;
    const int64_t ahead = run.end + tokens <= end ? tokens * args.value_token_stride : 0;
    if (streaming) {
      conv_run<A, true>(args, source, run, ahead);
    } else {
      conv_run<A, false>(args, source, run, ahead);
    }
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
