// engram.gather_fwd: e[t, c*hd:(c+1)*hd] = table[indices[t,c]], zeros for index -1.
// table [rows,hd], indices [T,C], e [T,C*hd]
//
// Bytes: C*hd*(table element + out element) + C*(index) a token.
// Rows are far apart in memory, so each is prefetched kAhead rows before it is copied.
// Class E: a copy of bits, or one conversion to nearest even.
#include "backends/cpu/simd.h"
#include "ops/engram/gather/gather_args.h"

namespace ehc::engram::EHC_ISA {
namespace {

namespace simd = ehc::simd::EHC_ISA;
using simd::kPair;

template <class In, class Out>
EHC_SIMD void convert(const In* from, Out* to, int64_t width, bool streaming) {
  for (int64_t i = 0; i < width; i += kPair) {
    const simd::Pair x = simd::natural_order<In>(simd::load_some(from + i, width - i));
    simd::store_some(to + i, simd::lane_order<Out>(x), width - i, streaming);
  }
}

template <class In, class Out>
inline void move_row(const In* from, Out* to, int64_t width, bool streaming) {
  convert(from, to, width, streaming);
}

// Same type: bits are moved, not values, so that no NaN changes.
template <class A>
inline void move_row(const A* from, A* to, int64_t width, bool streaming) {
  simd::move_bits(to, from, static_cast<size_t>(width) * sizeof(A), streaming);
}

// Always inline: GCC drops calls of a function that does nothing but prefetch.
template <class In>
EHC_SIMD void prefetch_row(const GatherForwardArgs& args, const RowCursor& at) {
  constexpr int64_t kLine = 64 / sizeof(In), kLines = 16;
  const int64_t index = row_index(args.indices, at.token, at.column);
  if (index < 0) return;
  const In* row = static_cast<const In*>(args.table) + index * args.table_row_stride;
  for (int64_t i = 0; i < args.width && i < kLines * kLine; i += kLine) simd::prefetch(row + i);
}

template <class In, class Out>
inline void gather_range(const GatherForwardArgs& args, int64_t begin, int64_t end) {
  constexpr int kAhead = 32;
  RowCursor ahead = {begin, 0, args.columns};
  for (int i = 0; i < kAhead && ahead.token < end; ++i) {
    prefetch_row<In>(args, ahead);
    ahead.advance();
  }
  for (RowCursor at = {begin, 0, args.columns}; at.token < end; at.advance()) {
    if (ahead.token < end) {
      prefetch_row<In>(args, ahead);
      ahead.advance();
    }
    Out* to =
        static_cast<Out*>(args.out) + at.token * args.out_token_stride + at.column * args.width;
    const int64_t index = row_index(args.indices, at.token, at.column);
    if (index < 0) {
      std::memset(to, 0, static_cast<size_t>(args.width) * sizeof(Out));
    } else {
      move_row(static_cast<const In*>(args.table) + index * args.table_row_stride, to, args.width,
               args.streaming && simd::can_stream(to));
    }
  }
  if (args.streaming) simd::stream_fence();
}

}  // namespace

void gather_fwd_rows(const GatherForwardArgs& args, int64_t begin, int64_t end) {
  simd::with_activation(args.table_type, [&](auto in) {
    simd::with_activation(args.out_type, [&](auto out) {
      gather_range<decltype(in), decltype(out)>(args, begin, end);
    });
  });
}

}  // namespace ehc::engram::EHC_ISA
