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
#include "ops/engram/shared/conv_state_simd.h"

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

template <class A>
inline float value_rstd(const ConvForwardArgs& args, int64_t token, int64_t stream) {
  const float squares = simd::square_sum(value_row<A>(args, token, stream), args.hidden);
  return reciprocal_rms(squares, args.hidden, args.conv.eps);
}

template <class A>
struct ConvOutput {
  const ConvForwardArgs& args;
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
  void image_token(int64_t token) {
    for (int64_t h = 0; h < args.streams; ++h) {
      std::memset(out_row<A>(args, token, h), 0, static_cast<size_t>(args.hidden) * sizeof(A));
    }
  }
};

template <class A>
inline void conv_range(const ConvForwardArgs& args, int64_t begin, int64_t end, float* scratch) {
  const int64_t history = conv_history(args.conv.taps, args.conv.dilation);
  const ConvSource<A> source = {static_cast<const A*>(args.gated_value),
                                args.value_token_stride,
                                args.value_stream_stride,
                                scratch,
                                history < begin ? begin - history : 0,
                                args.streams,
                                args.image_token_mask};
  const NormRow<A> norm = {source, scratch, args.hidden, args.conv.eps};
  WalkAhead<NormRow<A>> norms(norm, args.image_token_mask, args.streams, args.hidden);
  ConvOutput<A> output = {
      args, args.streaming &&
                simd::rows_can_stream<A>(args.out, args.out_token_stride, args.out_stream_stride)};
  const int64_t token_bytes = 2 * args.streams * args.hidden * static_cast<int64_t>(sizeof(A));
  convolve_range(args.conv, source, args.hidden, begin, end, token_bytes, output, norms);
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
