// mhc.post_fwd and mhc.post_bwd on SIMD lanes.
//
//   x'_o = round(c_o y + sum_i a_io b_i)
//   grad_y = round(sum_o c_o g_o)      grad_c_o = sum over d of y g_o
//   grad_b_i = round(sum_o a_io g_o)   grad_a_io = sum over d of b_i g_o
//   b, x', grad_b A[T,n,d]; g A or F32[T,n,d]; y, grad_y A[T,d]; c, grad_c F32[T,n]; a, grad_a
//   F32[T,n,n]
//
// Bytes a token in 16-bit types: forward (4n+2)d, backward (6n+4)d.
// Algorithm: the forward is one pass over the columns of a token, all streams side by side. In the
// backward y and the b_i are alike, n+1 rows with n coefficients each: a tile of the g_o stays in
// the first-level cache while row after row takes its n sums and its gradient from it, so that the
// sums of a row fit the registers. What comes next is prefetched.
// Activations are class E, grad_c and grad_a are class R per implementation: lanes depend on the
// column alone, whatever the tiles. Tokens are independent.

#include "ops/mhc/post/post_args.h"
#include "ops/mhc/post/post_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

using simd::kPair;
using simd::Pair;

template <class A, int kStreams>
inline void forward(const PostForwardArgs& args, const Tile& tile) {
  const int64_t streams = args.sizes.streams;
  const bool streaming = args.streaming && can_stream<A>(args.new_residual);
  const auto rows = [&](int64_t t) EHC_SIMD_LAMBDA {
    return PostRows<A>{token_row<const A>(args.layer_output, t),
                       token_rows<const A>(args.residual, t)};
  };
  for (int64_t t = tile.token_begin; t < tile.token_end; ++t) {
    const PostRows<A> soon = rows(t + 1 < tile.token_end ? t + 1 : t);
    const TokenRows<A> out = token_rows<A>(args.new_residual, t);
    post_columns<kStreams>(
        stream_vector(args.post, t, streams).value, stream_matrix(args.comb, t, streams).value,
        rows(t), streams, tile.column_begin, tile.column_end,
        [&](int64_t column) EHC_SIMD_LAMBDA {
          simd::prefetch(soon.layer_output + column);
          prefetch_streams<kStreams>(soon.residual, streams, column);
        },
        [](int64_t, int64_t, const Pair*) EHC_SIMD_LAMBDA {},
        [&](int64_t column, int64_t count, int64_t o, Pair x)
            EHC_SIMD_LAMBDA { simd::store_some(out[o] + column, x, count, streaming); });
  }
  if (streaming) simd::stream_fence();
}

// y or a b_i, with the coefficients that its output has in the streams and what it gets back.
template <class A, class G>
struct MixedRow {
  const A* row;
  const float* coefficients;  // [n]
  A* grad;
  Pair* sums;  // [n], of the columns so far

  // Columns [begin, end), given the gradients of the new streams. `soon` and `soon_grads` are
  // prefetched.
  template <int kStreams>
  inline void add_columns(const TokenRows<const G>& grads, const A* soon, const G* soon_grads,
                          int64_t streams, int64_t begin, int64_t end, bool streaming) const {
    Pair local[kStreams == 0 ? kMaxStreams : kStreams];
    for (int64_t o = 0; o < count_of<kStreams>(streams); ++o) local[o] = sums[o];
    int64_t column = begin;
    for (; column + kPair <= end; column += kPair) {
      simd::prefetch(soon + column);
      simd::prefetch(soon_grads + column);
      add_pair<kStreams>(grads, streams, column, kPair, streaming, local);
    }
    if (column < end) add_pair<kStreams>(grads, streams, column, end - column, false, local);
    for (int64_t o = 0; o < count_of<kStreams>(streams); ++o) sums[o] = local[o];
  }

 private:
  template <int kStreams>
  EHC_SIMD void add_pair(const TokenRows<const G>& grads, int64_t streams, int64_t column,
                         int64_t count, bool streaming, Pair* local) const {
    const Pair x = simd::load_some(row + column, count);
    Pair sum = simd::zero_pair();
    for (int64_t o = 0; o < count_of<kStreams>(streams); ++o) {
      const Pair g = load_gradient<A>(grads[o] + column, count);
      local[o] = fma(x, g, local[o]);
      sum = fma(simd::splat(coefficients[o]), g, sum);
    }
    simd::store_some(grad + column, sum, count, streaming);
  }
};

inline constexpr int64_t kTile = 1024;

template <class A>
EHC_SIMD const A* source_row(const PostBackwardArgs& args, int64_t token, int64_t r) {
  return r == 0 ? token_row<const A>(args.layer_output, token)
                : token_rows<const A>(args.residual, token)[r - 1];
}

template <class A, class G, int kStreams>
inline void backward_token(const PostBackwardArgs& args, int64_t t, int64_t next, bool streaming) {
  const int64_t streams = args.sizes.streams, hidden = args.sizes.hidden;
  const StreamVector post = stream_vector(args.post, t, streams);
  const StreamMatrix comb = stream_matrix(args.comb, t, streams);
  const auto grads = gradient_rows<const G>(args.grad_new_residual, t);
  Pair sums[(kMaxStreams + 1) * kMaxStreams];
  MixedRow<A, G> rows[kMaxStreams + 1];
  for (int64_t r = 0; r <= streams; ++r) {
    rows[r] = {source_row<A>(args, t, r), r == 0 ? post.value : comb.value + (r - 1) * streams,
               r == 0 ? token_row<A>(args.grad_layer_output, t)
                      : token_rows<A>(args.grad_residual, t)[r - 1],
               sums + r * streams};
  }
  for (int64_t k = 0; k < (streams + 1) * streams; ++k) sums[k] = simd::zero_pair();

  for (int64_t begin = 0; begin < hidden; begin += kTile) {
    const bool last = begin + kTile >= hidden;
    // The next tile: of this token, or the first of the next.
    const int64_t of_token = last ? next : t, shift = last ? -begin : kTile;
    const auto soon_grads = gradient_rows<const G>(args.grad_new_residual, of_token);
    for (int64_t r = 0; r <= streams; ++r) {
      rows[r].template add_columns<kStreams>(grads, source_row<A>(args, of_token, r) + shift,
                                             soon_grads[r < streams ? r : 0] + shift, streams,
                                             begin, last ? hidden : begin + kTile, streaming);
    }
  }
  float* grad_post = args.grad_post.data + t * args.grad_post.token_stride;
  float* grad_comb = args.grad_comb.data + t * args.grad_comb.token_stride;
  for (int64_t o = 0; o < streams; ++o) {
    grad_post[o] = reduce_add(rows[0].sums[o]);
    for (int64_t i = 0; i < streams; ++i) {
      grad_comb[i * args.grad_comb.row_stride + o] = reduce_add(rows[i + 1].sums[o]);
    }
  }
}

template <class A, class G, int kStreams>
inline void backward(const PostBackwardArgs& args, int64_t begin, int64_t end) {
  const bool streaming =
      args.streaming && can_stream<A>(args.grad_layer_output) && can_stream<A>(args.grad_residual);
  for (int64_t t = begin; t < end; ++t) {
    backward_token<A, G, kStreams>(args, t, t + 1 < end ? t + 1 : t, streaming);
  }
  if (streaming) simd::stream_fence();
}

}  // namespace

void post_fwd_tile(const PostForwardArgs& args, const Tile& tile) {
  with_kernel(args.sizes, [&](auto a, auto streams) {
    forward<decltype(a), decltype(streams)::value>(args, tile);
  });
}

void post_bwd_tokens(const PostBackwardArgs& args, int64_t begin, int64_t end) {
  with_kernel(args.sizes, [&](auto a, auto streams) {
    using A = decltype(a);
    if (args.grad_new_residual.is_f32) {
      return backward<A, float, decltype(streams)::value>(args, begin, end);
    }
    backward<A, A, decltype(streams)::value>(args, begin, end);
  });
}

}  // namespace ehc::mhc::EHC_ISA
