// engram.layer_fwd with a convolution, on SIMD lanes.
//
//   H' = round(x + alpha*v + silu(c)), c[t] = sum_k W[k] * u[t - (w-1-k)*dilation]
//   u = (v * beta) * g, beta = alpha / sqrt(alpha^2 mean(v^2) + eps), which is RMSNorm(alpha*v) * g
//   x, k, H' A[T,n,d]; v A[T,d]; alpha as in the gate
//
// Bytes: (6n+2)d a token in 16-bit types, the same as the gate alone.
// Algorithm: as conv_cpu.cc with v in place of V; what runs ahead, piece by piece, are the gates of
// the next run (alpha, beta). Gates of the history of a range are recomputed. Class R per
// implementation, batch-invariant.
#include "ops/engram/layer/layer_args.h"
#include "ops/engram/layer/layer_simd.h"
#include "ops/engram/shared/conv_state_simd.h"

namespace ehc::engram::EHC_ISA {
namespace {

// Scalars of tokens from `first` on, [tokens, n] each.
struct Scratch {
  float* beta;
  float* alpha;
  int64_t first;
};

struct KeepScalars {
  const LayerForwardArgs& args;
  const Scratch& scratch;
  int64_t begin;  // from here on the statistics of the tokens are outputs of this range

  EHC_SIMD void fetch(int64_t, int64_t, int64_t) const {}
  void keep(int64_t token, int64_t stream, const GateScalars& scalars, float value_square) const {
    if (token >= begin) save(args.gate, token, stream, scalars);
    const int64_t at = (token - scratch.first) * args.gate.streams + stream;
    scratch.alpha[at] = scalars.alpha;
    scratch.beta[at] = conv_beta(scalars.alpha, value_square, args.conv.eps);
  }
};

template <class A>
struct LayerOutput {
  const LayerForwardArgs& args;
  const Scratch& scratch;
  bool streaming;

  template <int kPairs>
  EHC_SIMD void finish(int64_t token, int64_t stream, int64_t column, int64_t count,
                       const Pair* value, const Pair* c) {
    const GateForwardArgs& gate = args.gate;
    const simd::Vec alpha =
        simd::splat(scratch.alpha[(token - scratch.first) * gate.streams + stream]);
    const A* residual = residual_row<A>(gate, token, stream) + column;
    A* out = out_row<A>(gate, token, stream) + column;
    const auto columns = [&](int p) EHC_SIMD_LAMBDA { return p + 1 < kPairs ? kPair : count; };
    Pair y[kPairs];
    for (int p = 0; p < kPairs; ++p) {
      y[p] = fma(alpha, value[p], simd::load_some(residual + p * kPair, columns(p)));
    }
    if (args.round_twice) {
      for (int p = 0; p < kPairs; ++p) y[p] = simd::rounded_to<A>(y[p]);
    }
    simd::add_silu<kPairs>(c, y);
    for (int p = 0; p < kPairs; ++p) {
      simd::store_some(out + p * kPair, y[p], columns(p), streaming);
    }
  }
  void image_token(int64_t token) { gate_masked_token<A>(args.gate, token); }
};

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
  const KeepScalars keep = {args, scratch, begin};
  auto gates = gates_ahead<A>(gate, keep);
  LayerOutput<A> output = {
      args, scratch,
      gate.streaming &&
          simd::rows_can_stream<A>(gate.out, gate.out_token_stride, gate.out_stream_stride)};
  const int64_t token_bytes =
      (3 * gate.streams + 2) * gate.hidden * static_cast<int64_t>(sizeof(A));
  convolve_range(args.conv, source, gate.hidden, begin, end, token_bytes, output, gates);
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
      const GateRow<A> row = gate_row<A>(gate, t, h);
      const GateScalars scalars =
          gate_scalars(gate_sum_row(row, gate.hidden), row, gate.hidden, gate.eps, gate.clamp);
      return conv_beta(scalars.alpha, mean_square_of_value<A>(gate, t), args.conv.eps);
    };
    for (int64_t sequence = begin; sequence < end; ++sequence) {
      next_state<A>(args.conv, {gate.streams, gate.hidden, gate.tokens, gate.image_token_mask},
                    static_cast<const A*>(gate.value), gate.value_token_stride, 0, sequence, beta);
    }
  });
}

}  // namespace ehc::engram::EHC_ISA
