// engram.grad_w_reduce on CUDA (sm_80+).
//
//   s = sum over p, ascending, of partial[p]; grad of one weight = fma(s, the other weight, target)
//   partial F32[P,n,d], weights W[n,d], targets and gradients F32[n,d]
//
// Bytes: 4*P*n*d + 12*n*d + the weights; 8*n*d with targets.
// Algorithm: a block has 64 columns. Its threads ask for 128 partials of each at once, in four
// groups; two warps add a group while the next ones are on their way. Serial in p for each column,
// so the bits are those of the float reference. Class E.
#include "backends/cuda/async_copy.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/pack.cuh"
#include "core/float_formats.h"
#include "ops/engram/grad_w_reduce/grad_w_reduce_args.h"

namespace ehc::engram {

namespace {

constexpr int kColumns = 64;
constexpr int kThreads = 256;
constexpr int kQuads = kColumns / 4;      // threads beside each other, four columns each
constexpr int kRows = kThreads / kQuads;  // partials that they load in one step
constexpr int kGroups = 4;                // on their way, one behind the other
constexpr int kOfGroup = 32;              // partials
constexpr int kTogether = kGroups * kOfGroup;

__device__ __forceinline__ float other_of(const WeightGradient& to, int64_t h, int64_t i) {
  return load_float(to.other.data, to.other.type, h * to.other.stream_stride + i);
}
__device__ __forceinline__ float target_of(const WeightGradient& to, int64_t h, int64_t i) {
  if (to.accumulated == nullptr) return 0;
  return to.accumulated[h * to.accumulated_stream_stride + i];
}

// kVector: four columns of a partial are on a border of 16 bytes, and all exist or none.
template <bool kVector>
__global__ void __launch_bounds__(kThreads)
    grad_w_reduce(const __grid_constant__ GradWReduceArgs a, int64_t column_blocks) {
  cuda::wait_for_previous();
  __shared__ __align__(16) float loaded[kTogether][kColumns];
  const int64_t h = blockIdx.x / column_blocks;
  const int64_t first = blockIdx.x % column_blocks * kColumns;
  const int quad = static_cast<int>(threadIdx.x) % kQuads * 4;
  const int row = static_cast<int>(threadIdx.x) / kQuads;
  const float* partial = a.partial + h * a.partial_stream_stride + first + quad;
  const auto fetch_group = [&](int64_t begin, int group) {
#pragma unroll
    for (int p = 0; p < kOfGroup; p += kRows) {
      const int at = group * kOfGroup + p + row;
      if (begin + at >= a.partials) continue;
      const float* from = partial + (begin + at) * a.partial_stride;
#pragma unroll
      for (int k = 0; k < 4; k += kVector ? 4 : 1) {
        if (first + quad + k >= a.hidden) continue;
        if constexpr (kVector) {
          cuda::start_copy(reinterpret_cast<cuda::Pack*>(&loaded[at][quad]), from);
        } else {
          cuda::start_copy_word(&loaded[at][quad + k], from + k);
        }
      }
    }
    cuda::commit_copies();
  };

  const int64_t i = first + threadIdx.x;
  const bool adds = threadIdx.x < kColumns && i < a.hidden;
  float sum = 0;
  float of_hidden = 0, of_embed = 0, hidden_target = 0, embed_target = 0;
  for (int64_t begin = 0; begin < a.partials || begin == 0; begin += kTogether) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) fetch_group(begin, group);
    if (adds && begin == 0) {
      of_hidden = other_of(a.of_hidden, h, i);
      of_embed = other_of(a.of_embed, h, i);
      hidden_target = target_of(a.of_hidden, h, i);
      embed_target = target_of(a.of_embed, h, i);
    }
    const auto add_group = [&](int group) {
      __syncthreads();
      const int64_t count = min(a.partials - begin - group * kOfGroup, int64_t{kOfGroup});
      if (!adds) return;
#pragma unroll 16
      for (int p = 0; p < count; ++p) sum += loaded[group * kOfGroup + p][threadIdx.x];
    };
    cuda::await_copies<3>(), add_group(0);
    cuda::await_copies<2>(), add_group(1);
    cuda::await_copies<1>(), add_group(2);
    cuda::await_copies<0>(), add_group(3);
    __syncthreads();
  }
  if (!adds) return;
  a.of_hidden.grad[h * a.of_hidden.grad_stream_stride + i] = fmaf(sum, of_hidden, hidden_target);
  a.of_embed.grad[h * a.of_embed.grad_stream_stride + i] = fmaf(sum, of_embed, embed_target);
}

}  // namespace

void grad_w_reduce_cuda(const GradWReduceArgs& a, int device, void* stream) {
  const int64_t column_blocks = (a.hidden + kColumns - 1) / kColumns;
  const bool vector = reinterpret_cast<uintptr_t>(a.partial) % 16 == 0 &&
                      (a.hidden | a.partial_stride | a.partial_stream_stride) % 4 == 0;
  cuda::launch_overlapping(
      "engram.grad_w_reduce", device, stream, vector ? &grad_w_reduce<true> : &grad_w_reduce<false>,
      dim3(cuda::blocks(column_blocks * a.streams)), dim3(kThreads), 0, a, column_blocks);
}

}  // namespace ehc::engram
