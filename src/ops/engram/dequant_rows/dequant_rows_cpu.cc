// engram.dequant_rows: values[r, i] = round(float(weight[r, i]) * 2^(scale[r, i / group] - 127)).
// weight [rows, hd], scale [rows, hd/group], values [rows, hd]
//
// Bytes: hd + hd/group read, hd elements written a row. A weight becomes an fp16 number by a shift,
// then fp32, then is multiplied by a power of two and rounded (row_format_simd.h). Weights are
// prefetched across the borders of pages. Class E.
#include "ops/engram/dequant_rows/dequant_rows_args.h"
#include "ops/engram/shared/row_format_simd.h"

namespace ehc::engram::EHC_ISA {

void decode_rows(const DequantRowsArgs& a, int64_t begin, int64_t end) {
  constexpr int64_t kAhead = 4096, kLine = 64;
  simd::with_activation(a.type, [&](auto type) {
    using Out = decltype(type);
    for (int64_t r = begin; r < end; ++r) {
      const uint8_t* weight = a.weight + r * a.weight_stride;
      for (int64_t i = 0; i < a.width; i += kLine) simd::prefetch(weight + i + kAhead);
      Out* to = static_cast<Out*>(a.values) + r * a.values_stride;
      decode_row(weight, a.scale + r * a.scale_stride, to, a.width, a.group,
                 a.streaming && simd::can_stream(to));
    }
    if (a.streaming) simd::stream_fence();
  });
}

}  // namespace ehc::engram::EHC_ISA
