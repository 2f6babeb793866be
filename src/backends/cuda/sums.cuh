// Sums over the threads of a block, in an order that the number of threads alone decides: lanes at
// distance 16, 8, 4, 2, 1, then warps in ascending order. Which values are summed together costs no
// bit.
#pragma once

#include <cuda_runtime.h>

namespace ehc::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffU;

namespace detail {

// At every distance a lane hands half of its sums to the other lane and keeps the rest, so that K
// sums take about K shuffles instead of 5 K. `count` sums from the `first` on end up in the lane,
// at most kSumsOfLane.
template <int kCount, int kDistance>
__device__ __forceinline__ void halve(float* sum, int& first, int& count) {
  constexpr int kHalf = (kCount + 1) / 2;
  const bool upper = (threadIdx.x & kDistance) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float high = i + kHalf < kCount ? sum[i + kHalf] : 0.0f;
    const float sent = upper ? sum[i] : high;
    const float kept = upper ? high : sum[i];
    sum[i] = kept + __shfl_xor_sync(kAllLanes, sent, kDistance);
  }
  first += upper ? kHalf : 0;
  count = upper ? count - kHalf : min(count, kHalf);
  if constexpr (kDistance > 1) halve<kHalf, kDistance / 2>(sum, first, count);
}

template <int kCount>
inline constexpr int kSumsOfLane = (kCount + kWarp - 1) / kWarp;

}  // namespace detail

// Room of a block for the sums of its warps.
template <int kCount, int kThreads>
struct SumRoom {
  float of_warp[kThreads / kWarp][kCount];
};

// Calls use(k, total) once for every k < kCount, each by some thread of the block, with the sum of
// sum[k] over all threads. Blocks are whole warps in x; all threads take part.
template <int kCount, int kThreads, class Use>
__device__ __forceinline__ void block_sums(float (&sum)[kCount], SumRoom<kCount, kThreads>& room,
                                           const Use& use) {
  int first = 0;
  int count = kCount;
  detail::halve<kCount, kWarp / 2>(sum, first, count);
  const bool alone = blockDim.x == kWarp;
#pragma unroll
  for (int i = 0; i < detail::kSumsOfLane<kCount>; ++i) {
    if (i >= count) continue;
    if (alone) {
      use(first + i, sum[i]);
    } else {
      room.of_warp[threadIdx.x / kWarp][first + i] = sum[i];
    }
  }
  if (alone) return;
  __syncthreads();
  for (int k = threadIdx.x; k < kCount; k += blockDim.x) {
    float total = room.of_warp[0][k];
    for (int w = 1; w < blockDim.x / kWarp; ++w) total += room.of_warp[w][k];
    use(k, total);
  }
}

// The sum of value[lane / 8] over the lanes of a warp, in the same order, by a third of the
// shuffles of four sums.
__device__ __forceinline__ float four_sums(const float (&value)[4]) {
  const bool upper = (threadIdx.x & 16) != 0;
  float sum[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sent = upper ? value[i] : value[i + 2];
    const float kept = upper ? value[i + 2] : value[i];
    sum[i] = kept + __shfl_xor_sync(kAllLanes, sent, 16);
  }
  const bool odd = (threadIdx.x & 8) != 0;
  float total = odd ? sum[1] : sum[0];
  total += __shfl_xor_sync(kAllLanes, odd ? sum[0] : sum[1], 8);
#pragma unroll
  for (int distance = 4; distance > 0; distance /= 2) {
    total += __shfl_xor_sync(kAllLanes, total, distance);
  }
  return total;
}

// Waits for the threads of a team: whole warps of a block, `team` below 15.
__device__ __forceinline__ void sync_team(int team, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(threads) : "memory");
}

}  // namespace ehc::cuda
