// mhc.amax_gain in fp32, compiled for each instruction set and for two and four streams.
//
//   forward = max over o of sum_i |m_io|, backward = max over i of sum_o |m_io|, of each layer's
//   map and of their product; m F32[L,T,n,n], gains F32[L,T], those of the product F32[T]
//
// Bytes: 4L(n^2+2) a token.
// Algorithm: a token's maps one after the other, each read once, the product in registers where n
// is a constant. The same operations in the same order as the loops of the reference: same bits as
// those in float, whatever the instruction set. Tokens are independent.
#include "ops/mhc/amax_gain/amax_gain_math.h"
#include "ops/mhc/shared/stream_rows_simd.h"

namespace ehc::mhc::EHC_ISA {

void amax_gain_tokens(const AmaxGainArgs& args, int64_t begin, int64_t end) {
  with_streams(args.streams, [&](auto streams) {
    const int64_t n = count_of<decltype(streams)::value>(args.streams);
    for (int64_t t = begin; t < end; ++t) amax_gain_token<float>(args, t, n);
  });
}

}  // namespace ehc::mhc::EHC_ISA
