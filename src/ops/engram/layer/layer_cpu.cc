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
#include "ops/engram/conv/conv_simd.h"
#include "ops/engram/gate/gate_simd.h"
#include "ops/engram/layer/layer_args.h"

namespace ehc::engram::EHC_ISA {
namespace {

template <class A>
inline float mean_square_of_value(const GateForwardArgs& args, int64_t token) {
  return mean_square(value_row<A>(args, token), args.hidden);
}

// Scalars of tokens from `first` on, [tokens, n] each.
struct Scratch {
  float* beta;
  float* alpha;
  int64_t first;
};

// Gates of tokens in order, a piece of a row at a time.
template <class A>
class GatesAhead {
 public:
  GatesAhead(const LayerForwardArgs& args, const Scratch& scratch)
      : args_(args), scratch_(scratch) {}

  // `own`: the statistics of these tokens are outputs of this range.
  void open(int64_t begin, int64_t end, bool own) {
    token_ = begin;
    end_ = end;
    own_ = own;
    next_row();
  }
  EHC_SIMD void work() {
    if (token_ == end_) return;
    const int64_t hidden = args_.gate.hidden;
    for (int p = 0; p < kTilePairs && column_ < hidden; ++p, column_ += kPair) {
      simd::prefetch(row_.residual + column_ + kFarAhead);
      simd::prefetch(row_.key + column_ + kFarAhead);
      if (stream_ == 0) simd::prefetch(next_value_ + column_);
      gate_sum_pair(sums_, row_, column_, hidden - column_);
    }
    if (column_ >= hidden) close_row();
  }
  void finish() {
    while (token_ != end_) work();
  }

 private:
  // Elements between what is read and what is prefetched.
  static constexpr int64_t kFarAhead = 4096;

  void close_row() {
    const GateForwardArgs& gate = args_.gate;
    const GateScalars scalars = gate_scalars(sums_, row_, gate.hidden, gate.eps, gate.clamp);
    if (own_) save(gate, token_, stream_, scalars);
    const int64_t at = (token_ - scratch_.first) * gate.streams + stream_;
    scratch_.alpha[at] = scalars.alpha;
    scratch_.beta[at] = conv_beta(scalars.alpha, value_square_, args_.conv.eps);
    if (++stream_ == gate.streams) {
      stream_ = 0;
      ++token_;
    }
    next_row();
  }
  void next_row() {
    const GateForwardArgs& gate = args_.gate;
    while (token_ != end_ && masked(gate.image_token_mask, token_)) ++token_;
    if (token_ == end_) return;
    if (stream_ == 0) {
      value_square_ = mean_square_of_value<A>(gate, token_);
      next_value_ = value_row<A>(gate, token_) + gate.value_token_stride;
    }
    row_ = gate_row<A>(gate, token_, stream_);
    column_ = 0;
    sums_ = GateSums{};
  }

  const LayerForwardArgs& args_;
  const Scratch& scratch_;
  int64_t token_ = 0, end_ = 0, stream_ = 0, column_ = 0;
  bool own_ = false;
  float value_square_ = 0;
  const A* next_value_ = nullptr;
  GateRow<A> row_{};
  GateSums sums_;
};

template <class A>
struct LayerOutput {
  const LayerForwardArgs& args;
  const Scratch& scratch;
  GatesAhead<A>& ahead;
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
  EHC_SIMD void work_ahead() { ahead.work(); }
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
  const bool streaming = gate.streaming && simd::can_stream(gate.out) &&
                         gate.out_token_stride * sizeof(A) % 64 == 0 &&
                         gate.out_stream_stride * sizeof(A) % 64 == 0;
  const int64_t limit =
      run_limit(args.conv, (3 * gate.streams + 2) * gate.hidden * static_cast<int64_t>(sizeof(A)));
  const PreparedWeights weights = prepared_weights(args.conv, gate.streams, gate.hidden);
  GatesAhead<A> gates(args, scratch);
  gates.open(first, begin, false);
  gates.finish();

  RunCursor cursor(args.conv, begin, end);
  ConvRun run = cursor.next(limit);
  gates.open(run.begin, run.end, true);
  LayerOutput<A> output = {args, scratch, gates, streaming};
  while (run.begin < run.end) {
    gates.finish();
    const ConvRun next = cursor.next(limit);
    gates.open(next.begin, next.end, true);
    for (int64_t t = run.begin; t < run.end; ++t) {
      if (masked(gate.image_token_mask, t)) gate_masked_token<A>(gate, t);
    }
    convolve_run(args.conv, source, weights, run, gate.streams, gate.hidden, output);
    run = next;
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
