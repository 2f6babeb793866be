// mhc.expand_fwd on SIMD lanes.
//
//   x_i = h for all i    h A[T,d], x A[T,n,d]
//
// Bytes a token in 16-bit types: 2(1+n)d.
// Algorithm: a row is copied to its streams one after the other, from the first-level cache but for
// the first time; the row of the next token is prefetched meanwhile.
// Exact: bits are moved, not values.
#include "ops/mhc/expand/expand_args.h"
#include "ops/mhc/shared/stream_rows_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

template <class A>
inline void expand(const ExpandForwardArgs& args, const Tile& tile) {
  constexpr int64_t kLine = 64 / sizeof(A);
  const bool streaming = args.streaming && can_stream<A>(args.residual);
  const auto bytes = static_cast<size_t>(tile.column_end - tile.column_begin) * sizeof(A);
  for (int64_t t = tile.token_begin; t < tile.token_end; ++t) {
    const A* next = token_row<const A>(args.hidden, t + 1 < tile.token_end ? t + 1 : t);
    for (int64_t i = tile.column_begin; i < tile.column_end; i += kLine) simd::prefetch(next + i);
    const A* hidden = token_row<const A>(args.hidden, t) + tile.column_begin;
    const TokenRows<A> residual = token_rows<A>(args.residual, t);
    for (int64_t i = 0; i < args.sizes.streams; ++i) {
      simd::move_bits(residual[i] + tile.column_begin, hidden, bytes, streaming);
    }
  }
  if (streaming) simd::stream_fence();
}

}  // namespace

void expand_fwd_tile(const ExpandForwardArgs& args, const Tile& tile) {
  simd::with_activation(args.sizes.activation, [&](auto a) { expand<decltype(a)>(args, tile); });
}

}  // namespace ehc::mhc::EHC_ISA
