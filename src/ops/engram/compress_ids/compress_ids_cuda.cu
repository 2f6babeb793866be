// engram.compress_ids on CUDA (sm_80+): compressed[t] = table[ids[t]], -1 or the id itself where
// there is no such element. ids I32/I64[T], table I32[V], compressed I32[T].
//
// Bytes per token: 4 or 8 and 4 gathered (from L2, which holds tables of vocabularies) read, 4
// written. A thread takes a token, or of many four a block's width apart, so that as many table
// reads are on the way. Exact.
#include "backends/cuda/launch.cuh"
#include "ops/engram/compress_ids/compress_ids_math.h"

namespace ehc::engram {

namespace {

constexpr int kThreads = 256;

template <class Id, int kTokens>
__global__ void compress_ids_kernel(const __grid_constant__ CompressIdsArgs a) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kTokens + threadIdx.x;
  const auto* ids = static_cast<const Id*>(a.ids);
  int32_t out[kTokens] = {};
#pragma unroll
  for (int k = 0; k < kTokens; ++k) {
    const int64_t t = first + k * kThreads;
    if (t < a.tokens) out[k] = compressed_id(a, ids[t]);
  }
#pragma unroll
  for (int k = 0; k < kTokens; ++k) {
    const int64_t t = first + k * kThreads;
    if (t < a.tokens) a.compressed[t] = out[k];
  }
}

template <int kTokens>
void compress(const CompressIdsArgs& a, int device, void* stream) {
  constexpr int64_t kOfBlock = kThreads * kTokens;
  cuda::launch("engram.compress_ids", device, stream,
               a.ids_are_64 ? &compress_ids_kernel<int64_t, kTokens>
                            : &compress_ids_kernel<int32_t, kTokens>,
               dim3(cuda::blocks((a.tokens + kOfBlock - 1) / kOfBlock)), dim3(kThreads), 0, a);
}

}  // namespace

void compress_ids_cuda(const CompressIdsArgs& a, int device, void* stream) {
  if (a.tokens == 0) return;
  if (a.tokens < int64_t{1} << 20) return compress<1>(a, device, stream);
  compress<4>(a, device, stream);
}

}  // namespace ehc::engram
