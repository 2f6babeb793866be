// mhc.amax_gain on CUDA (sm_80+).
//
//   forward = max over o of sum_i |m_io|, backward = max over i of sum_o |m_io|, of each layer's
//   map and of their product; m F32[L,T,n,n], gains F32[L,T], those of the product F32[T]
//
// Bytes: 4L(n^2+2) a token.
// Algorithm: a thread per token, its maps one after the other, the product in registers where n is
// a constant. The same operations in the same order as the loops of the reference in float. Tokens
// are independent.
#include "ops/mhc/amax_gain/amax_gain_math.h"
#include "ops/mhc/shared/stream_rows.cuh"

namespace ehc::mhc {

namespace {

template <int kStreams>
struct Gains {
  AmaxGainArgs a;

  __device__ void operator()(int64_t t) const {
    amax_gain_token<float>(a, t, count_of<kStreams>(a.streams));
  }
};

}  // namespace

void amax_gain_cuda(const AmaxGainArgs& a, int64_t tokens, int device, void* stream) {
  with_streams(a.streams, [&](auto streams) {
    cuda::launch_each("mhc.amax_gain", device, stream, tokens, Gains<streams()>{a});
  });
}

}  // namespace ehc::mhc
