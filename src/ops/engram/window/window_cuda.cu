// engram.window on CUDA (sm_80+): window[t,k] = the id k positions before token t in its sequence,
// or the pad id where a slot is blocked. ids I32[T], window I32[T,Nmax].
//
// Bytes per token: 4 read, 4*Nmax written. A thread per token, which finds its sequence by bisection
// of the borders and makes its row in shared memory; the block then writes its rows together. Exact.
#include "backends/cuda/launch.cuh"
#include "ops/engram/window/window_math.h"

namespace ehc::engram {

namespace {

constexpr int kThreads = 256;
constexpr int kMostNgram = 8;

// A known number of slots is unrolled; 0 stands for any.
template <int kMaxNgram>
__global__ void window_kernel(const __grid_constant__ WindowArgs a) {
  __shared__ int32_t rows[kThreads * (kMaxNgram > 0 ? kMaxNgram : kMostNgram)];
  const int32_t slots = kMaxNgram > 0 ? kMaxNgram : a.max_ngram;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads;
  const int64_t t = first + threadIdx.x;
  if (t < a.tokens) {
    const int64_t sequence = sequence_of(a, t);
    window_row(a, slots, t, sequence, sequence_start(a, sequence), rows + threadIdx.x * slots);
  }
  __syncthreads();
  const int count = static_cast<int>(min(static_cast<int64_t>(kThreads), a.tokens - first)) * slots;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    a.window[(first + i / slots) * a.window_stride + i % slots] = rows[i];
  }
}

}  // namespace

void window_cuda(const WindowArgs& a, int device, void* stream) {
  if (a.tokens == 0) return;
  const auto kernel = a.max_ngram == 3   ? &window_kernel<3>
                      : a.max_ngram == 4 ? &window_kernel<4>
                                         : &window_kernel<0>;
  cuda::launch("engram.window", device, stream, kernel,
               dim3(cuda::blocks((a.tokens + kThreads - 1) / kThreads)), dim3(kThreads), 0, a);
}

}  // namespace ehc::engram
