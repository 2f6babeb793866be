// mhc.multilayer_recompute on SIMD lanes.
//
//   layer_input_l = round(sum_i pre_l,i x_i), then x'_o = round(c_l,o y_l + sum_i a_l,io x_i) is
//   the x of the next layer; x A[T,n,d]; layer_input, y A[T,d]; pre, c F32[T,n]; a F32[T,n,n]
//
// Bytes a token in 16-bit types, Ll inputs and Lp posts: 2nd + Ll(4n+2d) + Lp(2d+4n+4n^2+2nd).
// Algorithm: columns are independent, so a block of columns of a token goes through all layers with
// its streams in the first-level cache: in the outputs themselves, or in a buffer beside outputs
// that are stored past the caches. A layer is one loop over pairs of columns by the steps of
// pre_apply and post; the next layer's output is prefetched meanwhile. Class E: the steps are
// shared, and each residual is rounded before the next layer reads it.
#include "ops/mhc/multilayer_recompute/multilayer_recompute_args.h"
#include "ops/mhc/post/post_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

inline constexpr int64_t kColumns = 1024;

// The first column of a block.
struct Place {
  int64_t token, column;
};

template <class A>
EHC_SIMD TokenRows<A> rows_at(const StreamRows& rows, const Place& at) {
  return {token_row<A>(rows, at.token) + at.column, rows.stream_stride};
}

// `count` columns through all layers. The first rows of the `next` block are prefetched.
template <class A, int kStreams>
inline void recompute_columns(const RecomputeArgs& args, const Place& at, const Place& next,
                              int64_t count, bool streaming) {
  alignas(64) A buffer[kMaxStreams * kColumns];
  const int64_t streams = args.sizes.streams;
  TokenRows<const A> x = rows_at<const A>(args.residual, at);
  for (int64_t l = 0; l < args.layer_count; ++l) {
    const RecomputeLayer& layer = args.layers[l];
    const StreamVector pre = stream_vector(layer.pre, at.token, streams);
    A* layer_input = rows_at<A>(layer.layer_input, at).first;
    if (!layer.has_post) {
      pre_apply_columns<kStreams>(pre.value, x, layer_input, streams, 0, count, streaming,
                                  [](int64_t) EHC_SIMD_LAMBDA {});
      return;
    }
    const bool goes_on = l + 1 < args.layer_count && args.layers[l + 1].has_post;
    const A* soon = goes_on ? rows_at<const A>(args.layers[l + 1].layer_output, at).first
                            : rows_at<const A>(args.layers[0].layer_output, next).first;
    const auto soon_residual = rows_at<const A>(args.residual, next);
    const TokenRows<A> out = rows_at<A>(layer.new_residual, at);
    const TokenRows<A> made = streaming ? TokenRows<A>{buffer, kColumns} : out;
    post_columns<kStreams>(
        stream_vector(layer.post, at.token, streams).value,
        stream_matrix(layer.comb, at.token, streams).value,
        PostRows<A>{rows_at<const A>(layer.layer_output, at).first, x}, streams, 0, count,
        [&](int64_t column) EHC_SIMD_LAMBDA {
          simd::prefetch_near(soon + column);
          if (l == 0) prefetch_streams<kStreams>(soon_residual, streams, column);
        },
        [&](int64_t column, int64_t columns, const simd::Pair* residual) EHC_SIMD_LAMBDA {
          simd::store_some(layer_input + column,
                           pre_apply_pair<kStreams>(pre.value, residual, streams), columns,
                           streaming);
        },
        [&](int64_t column, int64_t columns, int64_t o, simd::Pair pair) EHC_SIMD_LAMBDA {
          simd::store_some(made[o] + column, pair, columns, false);
          if (streaming) simd::store_some(out[o] + column, pair, columns, true);
        });
    x = {made.first, made.stride};
  }
}

template <class A>
EHC_SIMD bool can_stream(const RecomputeArgs& args) {
  for (int64_t l = 0; l < args.layer_count; ++l) {
    const RecomputeLayer& layer = args.layers[l];
    if (!can_stream<A>(layer.layer_input)) return false;
    if (layer.has_post && !can_stream<A>(layer.new_residual)) return false;
  }
  return true;
}

template <class A, int kStreams>
inline void recompute(const RecomputeArgs& args, const Tile& tile) {
  const bool streaming = args.streaming && can_stream<A>(args);
  for (int64_t t = tile.token_begin; t < tile.token_end; ++t) {
    for (int64_t c = tile.column_begin; c < tile.column_end; c += kColumns) {
      const bool last = c + kColumns >= tile.column_end;
      const Place next = last ? Place{t + 1 < tile.token_end ? t + 1 : t, tile.column_begin}
                              : Place{t, c + kColumns};
      recompute_columns<A, kStreams>(args, {t, c}, next, last ? tile.column_end - c : kColumns,
                                     streaming);
    }
  }
  if (streaming) simd::stream_fence();
}

}  // namespace

void recompute_tile(const RecomputeArgs& args, const Tile& tile) {
  with_kernel(args.sizes, [&](auto a, auto streams) {
    recompute<decltype(a), decltype(streams)::value>(args, tile);
  });
}

}  // namespace ehc::mhc::EHC_ISA
