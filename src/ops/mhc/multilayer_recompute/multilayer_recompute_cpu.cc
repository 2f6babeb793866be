// mhc.multilayer_recompute on SIMD lanes.
//
//   layer_input_l = round(sum_i pre_l,i x_i), then x'_o = round(c_l,o y_l + sum_i a_l,io x_i) is
//   the x of the next layer; x A[T,n,d]; layer_input, y A[T,d]; pre, c F32[T,n]; a F32[T,n,n]
//
// Bytes a token in 16-bit types, Ll inputs and Lp posts: 2nd + Ll(4n+2d) + Lp(2d+4n+4n^2+2nd).
// Algorithm: columns are independent, so a block of columns of a token goes through all layers with
// its streams in the first-level cache, by the steps of pre_apply and post. They are the outputs
// themselves, or a buffer when those are stored past the caches.
// Class E: the steps are shared, and each residual is rounded before the next layer reads it.
#include "ops/mhc/multilayer_recompute/multilayer_recompute_args.h"
#include "ops/mhc/post/post_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

inline constexpr int64_t kColumns = 1024;

// Rows that begin at another column.
template <class A>
EHC_SIMD TokenRows<A> shifted(const TokenRows<A>& rows, int64_t column) {
  return {rows.first + column, rows.stride};
}

// `count` columns of a token from `column` on, through all layers. `soon` is prefetched.
template <class A, int kStreams>
inline void recompute_columns(const RecomputeArgs& args, int64_t token, int64_t column,
                              int64_t count, const TokenRows<const A>& soon, bool streaming) {
  alignas(64) A buffer[kMaxStreams * kColumns];
  const int64_t streams = args.sizes.streams;
  TokenRows<const A> x = shifted(token_rows<const A>(args.residual, token), column);
  for (int64_t l = 0; l < args.layer_count; ++l) {
    const RecomputeLayer& layer = args.layers[l];
    const bool first = l == 0;
    const A* y = layer.has_post ? token_row<const A>(layer.layer_output, token) + column : nullptr;
    pre_apply_columns<kStreams>(stream_vector(layer.pre, token, streams).value, x,
                                token_row<A>(layer.layer_input, token) + column, streams, 0, count,
                                streaming, [&](int64_t at) EHC_SIMD_LAMBDA {
                                  if (y) simd::prefetch_near(y + at);
                                });
    if (!y) return;
    const TokenRows<A> out = shifted(token_rows<A>(layer.new_residual, token), column);
    const TokenRows<A> made = streaming ? TokenRows<A>{buffer, kColumns} : out;
    post_columns<kStreams>(stream_vector(layer.post, token, streams).value,
                           stream_matrix(layer.comb, token, streams).value, PostRows<A>{y, x}, made,
                           streams, 0, count, false, [&](int64_t at) EHC_SIMD_LAMBDA {
                             if (first) prefetch_streams<kStreams>(soon, streams, at);
                           });
    for (int64_t i = 0; streaming && i < streams; ++i) {
      simd::move_bits(out[i], made[i], static_cast<size_t>(count) * sizeof(A), true);
    }
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
      const int64_t count = last ? tile.column_end - c : kColumns;
      const int64_t next = t + 1 < tile.token_end ? t + 1 : t;
      const auto soon = last ? shifted(token_rows<const A>(args.residual, next), tile.column_begin)
                             : shifted(token_rows<const A>(args.residual, t), c + kColumns);
      recompute_columns<A, kStreams>(args, t, c, count, soon, streaming);
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
