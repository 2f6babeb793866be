// engram.layer_bwd with a convolution, on SIMD lanes.
//
//   gV: conv_bwd_cpu.cc with V = alpha * v and G = grad_out; n = v * beta
//   grad_alpha = sum gV v, grad_v = round(sum_h alpha gV), then grad_x, grad_k, grad_wf as in
//   gate_bwd_cpu.cc with grad_out for the residual path
//   x, k, G, grad_x, grad_k A[T,n,d]; v, grad_v A[T,d]; partial sums F32[P,n,d] and [P,n,w,d]
//
// Bytes: (10n+4)d a token in 16-bit types; x and k are read a second time, from cache.
// Algorithm: a chunk of tokens at a time, in runs, stream by stream: the convolution's tiles leave
// rows g gu of the tokens that are final, one pass makes gV of them in place, grad_alpha and
// grad_v, another grad_x, grad_k and grad_wf. What runs ahead, piece by piece, are the gates of the
// next run. gV is never written. Class R per implementation; gradients of a token are
// batch-invariant.
#include "ops/engram/conv_bwd/conv_bwd_simd.h"
#include "ops/engram/gate_bwd/gate_bwd_simd.h"
#include "ops/engram/layer/layer_simd.h"
#include "ops/engram/layer_bwd/layer_bwd_args.h"

namespace ehc::engram::EHC_ISA {
namespace {

// Pairs of columns worked on together once gV is known.
inline constexpr int kStreamPairs = simd::kPairsTogether >= 4 ? 2 : 1;

// Of the tokens from `first` on, [tokens, n] each.
struct Scalars {
  GateScalars* gate;
  float* beta;
  float* rstd_value;
  int64_t first, streams;

  EHC_SIMD int64_t at(int64_t token, int64_t stream) const {
    return (token - first) * streams + stream;
  }
};

template <class A>
struct KeepGates {
  const LayerBackwardArgs& args;
  const Scalars& scalars;

  EHC_SIMD void fetch(int64_t token, int64_t stream, int64_t column) const {
    simd::prefetch(gradient_row<A>(args.gate.grad_out, token, stream) + column);
  }
  void keep(int64_t token, int64_t stream, const GateScalars& gate, float value_square) const {
    const int64_t at = scalars.at(token, stream);
    scalars.gate[at] = gate;
    scalars.beta[at] = conv_beta(gate.alpha, value_square, args.conv.eps);
    scalars.rstd_value[at] = conv_rstd(gate.alpha, value_square, args.conv.eps);
  }
};

// One chunk: everything that its runs share.
template <class A>
class ChunkGradient {
 public:
  ChunkGradient(const LayerBackwardArgs& args, const Scalars& scalars, ConvGradient<A>& of_conv,
                float* value_rows, float* weight_rows)
      : args_(args),
        gate_(args.gate.gate),
        scalars_(scalars),
        of_conv_(of_conv),
        value_rows_(value_rows),
        weight_rows_(weight_rows),
        row_(conv_prepared_row(gate_.hidden)) {
    std::memset(weight_rows, 0, static_cast<size_t>(gate_.streams * row_) * sizeof(float));
  }

  // What follows ConvGradient::run() or token() for one stream; streams in ascending order.
  void finish_stream(const GradRun& r, int64_t stream) {
    for (int64_t t = r.final_begin; t < r.final_end; ++t) {
      if (masked(gate_.image_token_mask, t)) {
        if (stream == 0) write_image_token<A>(args_.gate, t);
      } else {
        value_path(r, t, stream);
      }
    }
    int64_t i = 0;
    for (; i + kStreamPairs * kPair <= gate_.hidden; i += kStreamPairs * kPair) {
      stream_tile<kStreamPairs>(r, stream, i, kPair);
    }
    for (; i < gate_.hidden; i += kPair) stream_tile<1>(r, stream, i, gate_.hidden - i);
  }

  void store_weight_sums(float* partial) const {
    for (int64_t h = 0; h < gate_.streams; ++h) {
      for (int64_t i = 0; i < gate_.hidden; i += kPair) {
        const Pair sum = simd::natural_order<A>(simd::load(weight_rows_ + h * row_ + i));
        simd::store_some(partial + h * gate_.hidden + i, sum, gate_.hidden - i, false);
      }
    }
  }

 private:
  // gV of a row, what it adds to grad_v, and the slopes.
  void value_path(const GradRun& r, int64_t token, int64_t stream) {
    const int64_t at = scalars_.at(token, stream);
    const GateScalars& scalars = scalars_.gate[at];
    const simd::Vec rstd = simd::splat(scalars_.rstd_value[at] * kUnfold);
    const simd::Vec beta = simd::splat(scalars_.beta[at]);
    const simd::Vec mean = simd::splat(-of_conv_.mean(r, token));
    const float* row = of_conv_.row(r, token);
    const A* grad = gradient_row<A>(args_.gate.grad_out, token, stream);
    const A* value = value_row<A>(gate_, token);
    float* sum = value_rows_ + (token - r.final_begin) * row_;
    A* out = gradient_row<A>(args_.gate.grad_value, token, 0);
    const bool first = stream == 0, last = stream + 1 == gate_.streams;
    Pair grad_alpha = simd::zero_pair();
    for (int64_t i = 0; i < gate_.hidden; i += kPair) {
      const int64_t count = gate_.hidden - i;
      const Pair v = simd::load_some(value + i, count);
      const Pair inner = fma(mean, mul(v, beta), simd::load(row + i));
      const Pair grad_value = fma(rstd, inner, simd::load_some(grad + i, count));
      grad_alpha = add_grad_alpha(grad_alpha, grad_value, v);
      const Pair so_far = first ? simd::zero_pair() : simd::load(sum + i);
      const Pair added = add_grad_value(so_far, scalars.alpha, grad_value);
      if (last) {
        simd::store_some(out + i, added, count, false);
      } else {
        simd::store(sum + i, added);
      }
    }
    slopes_[token - r.final_begin] =
        gate_slopes(reduce_add(grad_alpha), scalars, gate_.hidden, gate_.clamp);
  }

  // grad_x, grad_k and the sum grad_wf of some columns, for all tokens that are final.
  template <int kPairs>
  EHC_SIMD void stream_tile(const GradRun& r, int64_t stream, int64_t column, int64_t count) {
    const float* fused = gate_.weight_fused + stream * gate_.weight_stream_stride + column;
    float* sums = weight_rows_ + stream * row_ + column;
    const auto columns = [&](int p) EHC_SIMD_LAMBDA { return p + 1 < kPairs ? kPair : count; };
    Pair weight[kPairs], sum[kPairs];
    for (int p = 0; p < kPairs; ++p) {
      weight[p] = simd::load_f32_some<A>(fused + p * kPair, columns(p));
      sum[p] = simd::load(sums + p * kPair);
    }
    for (int64_t t = r.final_begin; t < r.final_end; ++t) {
      if (masked(gate_.image_token_mask, t)) continue;
      const GateSlopes& slopes = slopes_[t - r.final_begin];
      const A* grad = gradient_row<A>(args_.gate.grad_out, t, stream) + column;
      const A* residual = residual_row<A>(gate_, t, stream) + column;
      const A* key = key_row<A>(gate_, t, stream) + column;
      A* grad_residual = gradient_row<A>(args_.gate.grad_residual, t, stream) + column;
      A* grad_key = gradient_row<A>(args_.gate.grad_key, t, stream) + column;
      for (int p = 0; p < kPairs; ++p) {
        const int64_t i = p * kPair, some = columns(p);
        simd::prefetch_near(residual + i + kPairs * kPair);
        simd::prefetch_near(key + i + kPairs * kPair);
        const GateGradient gradient = gate_gradient(
            slopes, simd::load_some(grad + i, some), simd::load_some(residual + i, some),
            simd::load_some(key + i, some), weight[p], sum[p]);
        simd::store_some(grad_residual + i, gradient.residual, some, args_.gate.streaming);
        simd::store_some(grad_key + i, gradient.key, some, args_.gate.streaming);
      }
    }
    for (int p = 0; p < kPairs; ++p) simd::store(sums + p * kPair, sum[p]);
  }

  const LayerBackwardArgs& args_;
  const GateForwardArgs& gate_;
  const Scalars& scalars_;
  ConvGradient<A>& of_conv_;
  float* value_rows_;   // of the tokens that are final
  float* weight_rows_;  // [n], the sum over the chunk
  int64_t row_;
  GateSlopes slopes_[3 * kConvTileHistory];
};

template <class A>
inline void backward_chunk(const LayerBackwardArgs& args, int64_t chunk, float* scratch) {
  const GateForwardArgs& gate = args.gate.gate;
  const ShortConv& conv = args.conv;
  const int64_t size = conv_bwd_chunk(gate.tokens);
  const int64_t begin = chunk * size;
  const int64_t end = begin + size < gate.tokens ? begin + size : gate.tokens;
  const int64_t history = conv_history(conv.taps, conv.dilation);
  const LayerBackwardSizes sizes =
      layer_bwd_sizes(gate.tokens, gate.streams, gate.hidden, history, sizeof(A));

  float* value_rows = scratch + sizes.gradient;
  float* weight_rows = value_rows + sizes.value;
  float* at = weight_rows + sizes.weights;
  Scalars scalars = {nullptr, at, at + sizes.scalars, history < begin ? begin - history : 0,
                     gate.streams};
  scalars.gate = reinterpret_cast<GateScalars*>(at + 2 * sizes.scalars);

  const PreparedWeights weights = prepared_weights(conv, gate.streams, gate.hidden);
  const GradientRows& grad = args.gate.grad_out;
  const ConvGradSource<A> source = {
      {static_cast<const A*>(gate.value), gate.value_token_stride, 0, scalars.beta, scalars.first,
       gate.streams, gate.image_token_mask},
      static_cast<const A*>(grad.data),
      grad.token_stride,
      grad.stream_stride};
  ConvGradient<A> of_conv(conv, source, weights, gate.hidden, sizes.run, gate.streams, scratch);
  ChunkGradient<A> gradient(args, scalars, of_conv, value_rows, weight_rows);
  const KeepGates<A> keep = {args, scalars};
  auto gates = gates_ahead<A>(gate, keep);
  const auto partials = [&](int64_t h) {
    return PartialRows{args.sums.partials.of(chunk, h), weights.row};
  };
  std::memset(args.sums.partials.of(chunk, 0), 0,
              static_cast<size_t>(args.sums.partials.chunk_floats()) * sizeof(float));

  if (conv_bwd_in_tiles(history)) {
    gates.open(scalars.first, begin);
    gates.finish();
    GradCursor cursor(conv, gate.tokens, begin, end, sizes.run);
    GradRun run = cursor.next();
    gates.open(run.run.begin, run.run.end);
    while (run.run.begin < run.run.end) {
      gates.finish();
      const GradRun next = cursor.next();
      gates.open(next.run.begin, next.run.end);
      for (int64_t h = 0; h < gate.streams; ++h) {
        of_conv.run(run, h, h, partials(h), gates);
        gradient.finish_stream(run, h);
      }
      run = next;
    }
  } else {
    gates.open(scalars.first, history < gate.tokens - end ? end + history : gate.tokens);
    gates.finish();
    TokenCursor cursor(conv, gate.tokens, begin, end);
    for (int64_t t = begin; t < end; ++t) {
      const GradRun r = cursor.next();
      for (int64_t h = 0; h < gate.streams; ++h) {
        if (!source.value.masked(t)) of_conv.token(r, h, partials(h));
        gradient.finish_stream(r, h);
      }
    }
  }
  gradient.store_weight_sums(args.gate_partials + chunk * gate.streams * gate.hidden);
  if (args.gate.streaming) simd::stream_fence();
}

}  // namespace

void layer_bwd_chunks(const LayerBackwardArgs& args, int64_t begin, int64_t end, float* scratch) {
  simd::with_activation(args.gate.gate.activation, [&](auto a) {
    using A = decltype(a);
    LayerBackwardArgs of_type = args;
    of_type.gate.streaming = args.gate.streaming && can_stream<A>(args.gate.grad_residual) &&
                             can_stream<A>(args.gate.grad_key);
    for (int64_t chunk = begin; chunk < end; ++chunk) backward_chunk<A>(of_type, chunk, scratch);
  });
}

}  // namespace ehc::engram::EHC_ISA
