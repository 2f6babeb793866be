// mhc.defect on CUDA (sm_80+).
//
//   row_defect = max over i of |sum_o m_io - 1|, column_defect = max over o of |sum_i m_io - 1|
//   spectral_bound = sqrt(max over i of sum_o |m_io| * max over o of sum_i |m_io|)
//   m F32[T,n,n], outputs F32[T]
//
// Bytes: 4(n^2+3) a token.
// Algorithm: a thread per map, in registers where n is a constant. The same operations in the same
// order as the loops of the reference in float. Tokens are independent.
#include "ops/mhc/defect/defect_math.h"
#include "ops/mhc/shared/stream_rows.cuh"

namespace ehc::mhc {

namespace {

template <int kStreams>
struct DefectOf {
  DefectArgs a;

  __device__ void operator()(int64_t t) const {
    defect_token<float>(a, t, count_of<kStreams>(a.streams));
  }
};

}  // namespace

void defect_cuda(const DefectArgs& a, int64_t tokens, int device, void* stream) {
  with_streams(a.streams, [&](auto streams) {
    cuda::launch_each("mhc.defect", device, stream, tokens, DefectOf<streams()>{a});
  });
}

}  // namespace ehc::mhc
