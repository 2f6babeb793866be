// mhc.defect in fp32, compiled for each instruction set and for two and four streams.
//
//   row_defect = max over i of |sum_o m_io - 1|, column_defect = max over o of |sum_i m_io - 1|
//   spectral_bound = sqrt(max over i of sum_o |m_io| * max over o of sum_i |m_io|)
//   m F32[T,n,n], outputs F32[T]
//
// Bytes: 4(n^2+3) a token.
// Algorithm: a map at a time, in registers where n is a constant. The same operations in the same
// order as the loops of the reference: same bits as those in float, whatever the instruction set.
// Tokens are independent.
#include "ops/mhc/defect/defect_math.h"
#include "ops/mhc/shared/stream_rows_simd.h"

namespace ehc::mhc::EHC_ISA {

void defect_tokens(const DefectArgs& args, int64_t begin, int64_t end) {
  with_streams(args.streams, [&](auto streams) {
    const int64_t n = count_of<decltype(streams)::value>(args.streams);
    for (int64_t t = begin; t < end; ++t) defect_token<float>(args, t, n);
  });
}

}  // namespace ehc::mhc::EHC_ISA
