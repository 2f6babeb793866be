// mhc.pre_apply_fwd and mhc.pre_apply_bwd on SIMD lanes.
//
//   o = round(sum_i pre_i x_i)
//   grad_x_i = round(target_i + pre_i g)    grad_pre_i = sum over d of g x_i
//   x, target, grad_x A[T,n,d]; o, g A[T,d]; pre, grad_pre F32[T,n]
//
// Bytes a token in 16-bit types: forward (2n+2)d, backward (4n+2)d, with a target (6n+2)d.
// Algorithm: one pass over the columns of a token, all streams side by side; the rows of the next
// token are prefetched. The sums of the backward pass stay in registers.
// Activations are class E, grad_pre is class R per implementation: lanes depend on the column
// alone. Tokens are independent.
#include "ops/mhc/pre_apply/pre_apply_args.h"
#include "ops/mhc/pre_apply/pre_apply_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

using simd::kPair;
using simd::Pair;

// The pairs of columns in another order: from both halves of a row in turn. Fetched so, twice as
// many pages of memory are at work.
EHC_SIMD int64_t column_of_halves(const Tile& tile, int64_t column) {
  const int64_t step = (column - tile.column_begin) / kPair;
  const int64_t half = (tile.column_end - tile.column_begin) / kPair / 2;
  return tile.column_begin + (step % 2 * half + step / 2) * kPair;
}

template <class A, int kStreams>
inline void forward(const PreApplyForwardArgs& args, const Tile& tile) {
  const int64_t streams = args.sizes.streams;
  const bool streaming = args.streaming && can_stream<A>(args.layer_input);
  for (int64_t t = tile.token_begin; t < tile.token_end; ++t) {
    const auto soon = token_rows<const A>(args.residual, t + 1 < args.sizes.tokens ? t + 1 : t);
    pre_apply_columns<kStreams>(
        stream_vector(args.pre, t, streams).value, token_rows<const A>(args.residual, t),
        token_row<A>(args.layer_input, t), streams, tile.column_begin, tile.column_end, streaming,
        [&](int64_t column) EHC_SIMD_LAMBDA {
          prefetch_streams<kStreams>(soon, streams, column_of_halves(tile, column));
        });
  }
  if (streaming) simd::stream_fence();
}

// A token of the backward pass, or the one after it.
template <class A>
struct BackwardRows {
  const A* grad;
  TokenRows<const A> residual, target;
  TokenRows<A> grad_residual;

  BackwardRows(const PreApplyBackwardArgs& args, int64_t token)
      : grad(token_row<const A>(args.grad_layer_input, token)),
        residual(token_rows<const A>(args.residual, token)),
        target(token_rows<const A>(args.grad_residual_acc, token)),
        grad_residual(token_rows<A>(args.grad_residual, token)) {}
};

template <class A, int kStreams, bool kTarget>
EHC_SIMD void gradient_pair(const BackwardRows<A>& rows, const float* pre, int64_t streams,
                            int64_t column, int64_t count, bool streaming, Pair* sums) {
  const Pair grad = simd::load_some(rows.grad + column, count);
  for (int64_t i = 0; i < count_of<kStreams>(streams); ++i) {
    const Pair x = simd::load_some(rows.residual[i] + column, count);
    Pair target = simd::zero_pair();
    if constexpr (kTarget) target = simd::load_some(rows.target[i] + column, count);
    sums[i] = fma(grad, x, sums[i]);
    simd::store_some(rows.grad_residual[i] + column, fma(simd::splat(pre[i]), grad, target), count,
                     streaming);
  }
}

template <class A, int kStreams, bool kTarget>
inline void gradient_columns(const BackwardRows<A>& rows, const BackwardRows<A>& soon,
                             const float* pre, const StreamSizes& sizes, bool streaming,
                             Pair* grad_pre) {
  const int64_t streams = count_of<kStreams>(sizes.streams);
  Pair sums[kStreams == 0 ? kMaxStreams : kStreams];
  for (int64_t i = 0; i < streams; ++i) sums[i] = simd::zero_pair();
  int64_t column = 0;
  for (; column + kPair <= sizes.hidden; column += kPair) {
    simd::prefetch(soon.grad + column);
    for (int64_t i = 0; i < streams; ++i) {
      simd::prefetch(soon.residual[i] + column);
      if constexpr (kTarget) simd::prefetch(soon.target[i] + column);
    }
    gradient_pair<A, kStreams, kTarget>(rows, pre, streams, column, kPair, streaming, sums);
  }
  if (column < sizes.hidden) {
    gradient_pair<A, kStreams, kTarget>(rows, pre, streams, column, sizes.hidden - column, false,
                                        sums);
  }
  for (int64_t i = 0; i < streams; ++i) grad_pre[i] = sums[i];
}

template <class A, int kStreams>
inline void backward(const PreApplyBackwardArgs& args, int64_t begin, int64_t end) {
  const int64_t streams = args.sizes.streams;
  const bool streaming = args.streaming && can_stream<A>(args.grad_residual);
  for (int64_t t = begin; t < end; ++t) {
    const BackwardRows<A> rows(args, t), soon(args, t + 1 < end ? t + 1 : t);
    const StreamVector pre = stream_vector(args.pre, t, streams);
    Pair sums[kMaxStreams];
    if (args.grad_residual_acc.data) {
      gradient_columns<A, kStreams, true>(rows, soon, pre.value, args.sizes, streaming, sums);
    } else {
      gradient_columns<A, kStreams, false>(rows, soon, pre.value, args.sizes, streaming, sums);
    }
    float* grad_pre = args.grad_pre.data + t * args.grad_pre.token_stride;
    for (int64_t i = 0; i < streams; ++i) grad_pre[i] = reduce_add(sums[i]);
  }
  if (streaming) simd::stream_fence();
}

}  // namespace

void pre_apply_fwd_tile(const PreApplyForwardArgs& args, const Tile& tile) {
  with_kernel(args.sizes, [&](auto a, auto streams) {
    forward<decltype(a), decltype(streams)::value>(args, tile);
  });
}

void pre_apply_bwd_tokens(const PreApplyBackwardArgs& args, int64_t begin, int64_t end) {
  with_kernel(args.sizes, [&](auto a, auto streams) {
    backward<decltype(a), decltype(streams)::value>(args, begin, end);
  });
}

}  // namespace ehc::mhc::EHC_ISA
