// engram.window on CUDA (sm_80+): window[t,k] = the id k positions before token t in its sequence,
// or the pad id where a slot is blocked. ids I32[T], window I32[T,Nmax].
//
// Bytes per token: 4 read, 4*Nmax written. A thread takes four tokens a block's width apart, finds
// the sequence of each by bisection of the borders and makes its row in shared memory; the block
// then writes its rows together. Exact.
#include "backends/cuda/launch.cuh"
#include "ops/engram/window/window_math.h"

namespace ehc::engram {

namespace {

constexpr int kThreads = 128;
constexpr int kTokens = 4;  // of a thread
constexpr int kRows = kThreads * kTokens;
constexpr int kMostNgram = 8;

// A known number of slots is unrolled; 0 stands for any.
template <int kMaxNgram>
__global__ void window_kernel(const __grid_constant__ WindowArgs a) {
  constexpr int kMost = kMaxNgram > 0 ? kMaxNgram : kMostNgram;
  __shared__ int32_t rows[kRows * kMost];
  const int32_t slots = kMaxNgram > 0 ? kMaxNgram : a.max_ngram;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRows;
  int32_t row[kTokens][kMost];  // so that no read waits for a store
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int64_t t = first + i * kThreads + threadIdx.x;
    if (t >= a.tokens) continue;
    const int64_t sequence = sequence_of(a, t);
    window_row(a, slots, t, sequence, sequence_start(a, sequence), row[i]);
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int at = (i * kThreads + threadIdx.x) * slots;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      if (k < slots) rows[at + k] = row[i][k];
    }
  }
  __syncthreads();
  const int count = static_cast<int>(min(static_cast<int64_t>(kRows), a.tokens - first)) * slots;
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
               dim3(cuda::blocks((a.tokens + kRows - 1) / kRows)), dim3(kThreads), 0, a);
}

}  // namespace ehc::engram
