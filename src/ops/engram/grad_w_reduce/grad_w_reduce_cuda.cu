// engram.grad_w_reduce on CUDA (sm_80+).
//
//   s = sum over p, ascending, of partial[p]; grad of one weight = fma(s, the other weight, target)
//   partial F32[P,n,d], weights W[n,d], targets and gradients F32[n,d]
//
// Bytes: 4*P*n*d + 12*n*d + the weights; 8*n*d with targets.
// Algorithm: a block has 32 columns. All its threads bring partials to shared memory at once, a
// warp adds them. Serial in p for each column, so the bits are those of the float reference. Class
// E.
#include "backends/cuda/launch.cuh"
#include "backends/cuda/sums.cuh"
#include "core/float_formats.h"
#include "ops/engram/grad_w_reduce/grad_w_reduce_args.h"

namespace ehc::engram {

namespace {

constexpr int kColumns = cuda::kWarp;
constexpr int kRows = 8;        // threads of a column
constexpr int kTogether = 128;  // partials of a column in shared memory

__device__ __forceinline__ float other_of(const WeightGradient& to, int64_t h, int64_t i) {
  return load_float(to.other.data, to.other.type, h * to.other.stream_stride + i);
}
__device__ __forceinline__ float target_of(const WeightGradient& to, int64_t h, int64_t i) {
  if (to.accumulated == nullptr) return 0;
  return to.accumulated[h * to.accumulated_stream_stride + i];
}

__global__ void __launch_bounds__(kColumns* kRows)
    grad_w_reduce(const __grid_constant__ GradWReduceArgs a, int64_t column_blocks) {
  __shared__ float loaded[kTogether][kColumns];
  const int64_t h = blockIdx.x / column_blocks;
  const int64_t i = blockIdx.x % column_blocks * kColumns + threadIdx.x;
  const bool exists = i < a.hidden;
  const bool adds = threadIdx.y == 0 && exists;
  const float* partial = a.partial + h * a.partial_stream_stride + i;
  const float of_hidden = adds ? other_of(a.of_hidden, h, i) : 0.0f;
  const float of_embed = adds ? other_of(a.of_embed, h, i) : 0.0f;
  const float hidden_target = adds ? target_of(a.of_hidden, h, i) : 0.0f;
  const float embed_target = adds ? target_of(a.of_embed, h, i) : 0.0f;
  float sum = 0;
  for (int64_t first = 0; first < a.partials; first += kTogether) {
    const int count = static_cast<int>(min(a.partials - first, int64_t{kTogether}));
#pragma unroll
    for (int p = 0; p < kTogether; p += kRows) {
      const int at = p + static_cast<int>(threadIdx.y);
      if (exists && at < count) {
        loaded[at][threadIdx.x] = __ldg(partial + (first + at) * a.partial_stride);
      }
    }
    __syncthreads();
    if (adds) {
#pragma unroll 8
      for (int p = 0; p < count; ++p) sum += loaded[p][threadIdx.x];
    }
    __syncthreads();
  }
  if (!adds) return;
  a.of_hidden.grad[h * a.of_hidden.grad_stream_stride + i] = fmaf(sum, of_hidden, hidden_target);
  a.of_embed.grad[h * a.of_embed.grad_stream_stride + i] = fmaf(sum, of_embed, embed_target);
}

}  // namespace

void grad_w_reduce_cuda(const GradWReduceArgs& a, int device, void* stream) {
  const int64_t column_blocks = (a.hidden + kColumns - 1) / kColumns;
  cuda::launch("engram.grad_w_reduce", device, stream, &grad_w_reduce,
               dim3(cuda::blocks(column_blocks * a.streams)), dim3(kColumns, kRows), 0, a,
               column_blocks);
}

}  // namespace ehc::engram
