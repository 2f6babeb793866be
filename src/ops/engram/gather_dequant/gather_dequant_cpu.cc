// engram.gather_dequant: e[t, c*hd:(c+1)*hd] = decoded row indices[t,c], zeros for index -1.
// weight [rows,hd], scale [rows,hd/group], indices [T,C], e [T,C*hd]
//
// Bytes: C*(hd + hd/group) + C*(index) read, C*hd elements written a token. Rows are far apart in
// memory, so each is prefetched kAhead rows before it is decoded (row_format_simd.h). Class E.
#include "ops/engram/gather_dequant/gather_dequant_args.h"
#include "ops/engram/shared/row_format_simd.h"

namespace ehc::engram::EHC_ISA {
namespace {

// Always inline: GCC drops calls of a function that does nothing but prefetch.
EHC_SIMD void prefetch_row(const GatherDequantArgs& a, const RowCursor& at) {
  constexpr int64_t kLine = 64, kLines = 16;
  const int64_t index = row_index(a.indices, at.token, at.column);
  if (index < 0) return;
  const uint8_t* weight = a.weight + index * a.weight_stride;
  for (int64_t i = 0; i < a.width && i < kLines * kLine; i += kLine) simd::prefetch(weight + i);
  simd::prefetch(weight + a.width - 1);
  simd::prefetch(a.scale + index * a.scale_stride);
}

template <class Out>
void gather_range(const GatherDequantArgs& a, int64_t begin, int64_t end) {
  constexpr int kAhead = 16;
  RowCursor ahead = {begin, 0, a.columns};
  for (int i = 0; i < kAhead && ahead.token < end; ++i, ahead.advance()) prefetch_row(a, ahead);
  for (RowCursor at = {begin, 0, a.columns}; at.token < end; at.advance()) {
    if (ahead.token < end) {
      prefetch_row(a, ahead);
      ahead.advance();
    }
    Out* to = static_cast<Out*>(a.embedding) + at.token * a.token_stride + at.column * a.width;
    const int64_t index = row_index(a.indices, at.token, at.column);
    if (index < 0) {
      std::memset(static_cast<void*>(to), 0, static_cast<size_t>(a.width) * sizeof(Out));
    } else {
      decode_row(a.weight + index * a.weight_stride, a.scale + index * a.scale_stride, to, a.width,
                 a.group, a.streaming && simd::can_stream(to));
    }
  }
  if (a.streaming) simd::stream_fence();
}

}  // namespace

void gather_decode_rows(const GatherDequantArgs& a, int64_t begin, int64_t end) {
  simd::with_activation(a.type, [&](auto out) { gather_range<decltype(out)>(a, begin, end); });
}

}  // namespace ehc::engram::EHC_ISA
