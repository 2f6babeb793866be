// engram.layer_fwd with a convolution, on SIMD lanes.
//
//   H' = round(x + alpha*v + silu(c)), c[t] = sum_k W[k] * u[t - (w-1-k)*dilation]
//   u = (v * beta) * g, beta = alpha / sqrt(alpha^2 mean(v^2) + eps), which is RMSNorm(alpha*v) * g
//   x, k, H' A[T,n,d]; v A[T,d]; alpha as in the gate
//
// Bytes: (6n+2)d a token in 16-bit types, the same as the gate alone.
// Algorithm: runs of tokens whose rows fit in the second-level cache. First the gates of a run
// (alpha, beta), then the convolution as in conv_cpu.cc with v in place of V, while the x, k and v
// rows of the next run are prefetched. Gates of the history of a range are recomputed. Class R per
// implementation, batch-invariant.
#include "ops/engram/conv/conv_simd.h"
#include "ops/engram/gate/gate_simd.h"
#include "ops/engram/layer/layer_args.h"

namespace ehc::engram::EHC_ISA {
namespace {

template <class A>
EHC_SIMD GateScalars gate_of(const GateForwardArgs& args, int64_t token, int64_t stream) {
  GateSums sums;
  const GateRow<A> row = {residual_row<A>(args, token, stream), key_row<A>(args, token, stream),
                          args.weight_fused + stream * args.weight_stream_stride};
  gate_sum_columns(sums, row, 0, args.hidden);
  return gate_scalars(sums, args.hidden, args.eps, args.clamp);
}

// Scalars of tokens from `first` on, [tokens, n] each.
struct Scratch {
  float* beta;
  float* alpha;
  int64_t first;
};

template <class A>
inline void gates(const LayerForwardArgs& args, int64_t begin, int64_t end, const Scratch& scratch,
                  bool own) {
  const GateForwardArgs& gate = args.gate;
  for (int64_t t = begin; t < end; ++t) {
    if (masked(gate.image_token_mask, t)) continue;
    const float square = mean_square(value_row<A>(gate, t), gate.hidden);
    for (int64_t h = 0; h < gate.streams; ++h) {
      const GateScalars scalars = gate_of<A>(gate, t, h);
      if (own) save(gate, t, h, scalars);
      const int64_t at = (t - scratch.first) * gate.streams + h;
      scratch.alpha[at] = scalars.alpha;
      scratch.beta[at] = conv_beta(scalars.alpha, square, args.conv.eps);
    }
  }
}

// How far ahead the rows of the next run lie, in elements.
struct Ahead {
  int64_t residual, key, value;
};

template <class A, bool kStreaming>
inline void layer_run(const LayerForwardArgs& args, const ConvSource<A>& source,
                      const Scratch& scratch, const ConvRun& run, const Ahead& ahead) {
  const GateForwardArgs& gate = args.gate;
  const bool twice = args.round_twice;
  const auto finish = [&](int64_t t, int64_t h) EHC_SIMD_LAMBDA {
    const A* residual = residual_row<A>(gate, t, h);
    const A* value = value_row<A>(gate, t);
    A* out = out_row<A>(gate, t, h);
    const A* next_residual = residual + ahead.residual;
    const A* next_key = key_row<A>(gate, t, h) + ahead.key;
    const A* next_value = h == 0 ? value + ahead.value : next_key;
    const simd::Vec alpha = simd::splat(scratch.alpha[(t - scratch.first) * gate.streams + h]);
    const bool skip = masked(gate.image_token_mask, t);
    return [=]<int kPairs>(int64_t column, int64_t count, const Pair* activation) EHC_SIMD_LAMBDA {
      for (int p = 0; p < kPairs; ++p, column += kPair) {
        const int64_t columns = p + 1 < kPairs ? kPair : count;
        simd::prefetch(next_residual + column);
        simd::prefetch(next_key + column);
        simd::prefetch(next_value + column);
        if (skip) continue;
        Pair y = fma(alpha, simd::load_some(value + column, columns),
                     simd::load_some(residual + column, columns));
        if (twice) y = simd::rounded_to<A>(y);
        simd::store_some(out + column, add(y, activation[p]), columns, kStreaming);
      }
    };
  };
  convolve_run(args.conv, source, prepared_weights(args.conv, gate.streams, gate.hidden), run,
               gate.streams, gate.hidden, finish);
}

template <class A>
inline void layer_range(const LayerForwardArgs& args, int64_t begin, int64_t end, float* floats) {
  const GateForwardArgs& gate = args.gate;
  const int64_t history = conv_history(args.conv.taps, args.conv.dilation);
  const int64_t first = history < begin ? begin - history : 0;
  const Scratch scratch = {floats, floats + (end - first) * gate.streams, first};
  const ConvSource<A> source = {static_cast<const A*>(gate.value),
                                gate.value_token_stride,
                                0,
                                scratch.beta,
                                first,
                                gate.streams,
                                gate.image_token_mask};
  const bool streaming = gate.streaming && simd::can_stream(gate.out) &&
                         gate.out_token_stride * sizeof(A) % 64 == 0 &&
                         gate.out_stream_stride * sizeof(A) % 64 == 0;
  const int64_t limit =
      run_limit(args.conv, (3 * gate.streams + 2) * gate.hidden * static_cast<int64_t>(sizeof(A)));
  gates<A>(args, first, begin, scratch, false);
  RunCursor cursor(args.conv, begin, end);
  for (ConvRun run = cursor.next(limit); run.begin < run.end; run = cursor.next(limit)) {
    gates<A>(args, run.begin, run.end, scratch, true);
    for (int64_t t = run.begin; t < run.end; ++t) {
      if (masked(gate.image_token_mask, t)) gate_masked_token<A>(gate, t);
    }
    const int64_t tokens = run.end + (run.end - run.begin) <= end ? run.end - run.begin : 0;
    const Ahead ahead = {tokens * gate.residual_token_stride, tokens * gate.key_token_stride,
                         tokens * gate.value_token_stride};
    if (streaming) {
      layer_run<A, true>(args, source, scratch, run, ahead);
    } else {
      layer_run<A, false>(args, source, scratch, run, ahead);
    }
  }
  if (streaming) simd::stream_fence();
}

}  // namespace

void layer_prepare(const LayerForwardArgs& args, int64_t begin, int64_t end) {
  simd::with_activation(args.gate.activation, [&](auto a) {
    prepare_streams<decltype(a)>(args.conv, args.gate.streams, args.gate.hidden, begin, end);
  });
}

void layer_fwd_rows(const LayerForwardArgs& args, int64_t begin, int64_t end, float* scratch) {
  simd::with_activation(args.gate.activation,
                        [&](auto a) { layer_range<decltype(a)>(args, begin, end, scratch); });
}

void layer_state_rows(const LayerForwardArgs& args, int64_t begin, int64_t end) {
  const GateForwardArgs& gate = args.gate;
  simd::with_activation(gate.activation, [&](auto a) {
    using A = decltype(a);
    const auto beta = [&](int64_t t, int64_t h) {
      const float square = mean_square(value_row<A>(gate, t), gate.hidden);
      return conv_beta(gate_of<A>(gate, t, h).alpha, square, args.conv.eps);
    };
    for (int64_t sequence = begin; sequence < end; ++sequence) {
      next_state<A>(args.conv, {gate.streams, gate.hidden, gate.tokens, gate.image_token_mask},
                    static_cast<const A*>(gate.value), gate.value_token_stride, 0, sequence, beta);
    }
  });
}

}  // namespace ehc::engram::EHC_ISA
