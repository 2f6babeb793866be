// Rows of activations in the registers of a block, for operators with sums over d.
#pragma once

#include <algorithm>
#include <type_traits>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/pack.cuh"
#include "backends/cuda/sums.cuh"
#include "core/forced_grid.h"

namespace ehc::engram {

using cuda::column;
using cuda::kWidth;
using cuda::Pack;

inline constexpr int kRowThreads = 512;    // at most
inline constexpr int kMostThreads = 1024;  // where a thread has one pack

// Threads that share a row, each with `packs_of_thread` of it where kRowThreads suffice: by d and
// the type alone, for it decides the order of sums.
inline int row_threads(int64_t hidden, DType activation, int packs_of_thread) {
  const int64_t packs = cuda::packs_of(hidden, 16 / static_cast<int>(size_of(activation)));
  const int64_t warps = (packs + packs_of_thread * 32 - 1) / (packs_of_thread * 32);
  return static_cast<int>(std::clamp<int64_t>(warps * 32, 32, kRowThreads));
}

// Bytes of shared memory that a block can have.
inline size_t most_shared(const char* name, int device) {
  int bytes = 0;
  cuda::check(name,
              cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return static_cast<size_t>(bytes);
}

template <class... Params>
void allow_shared(const char* name, int device, void (*kernel)(Params...), size_t bytes) {
  const cuda::DeviceGuard guard(device);
  cuda::check(name, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(bytes)));
}

// Blocks of a kernel that the device runs at once, for blocks that walk over the work; allows the
// kernel that much shared memory.
template <class... Params>
int64_t resident_blocks(const char* name, int device, void (*kernel)(Params...), int threads,
                        size_t shared_bytes) {
  allow_shared(name, device, kernel, shared_bytes);
  const cuda::DeviceGuard guard(device);
  int of_processor = 0;
  int processors = 0;
  cuda::check(name, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_processor, kernel, threads,
                                                                  shared_bytes));
  cuda::check(name, cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  return free_blocks(int64_t{of_processor} * processors);
}

// Do rows at these strides, in elements, start on borders of 16 bytes?
inline bool is_vector(const void* data, int64_t size, int64_t token_stride, int64_t stream_stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && token_stride * size % 16 == 0 &&
         stream_stride * size % 16 == 0;
}

// Calls body(a, vector): the storage type, and whether rows move 16 bytes at a time.
template <class Body>
void with_rows(DType activation, bool vector, const Body& body) {
  cuda::with_activation(activation, [&](auto a) {
    if (vector) {
      body(a, std::true_type{});
    } else {
      body(a, std::false_type{});
    }
  });
}

// Read once by a block: not kept in its first-level cache, which is for weights.
template <bool kVector, class A>
__device__ __forceinline__ Pack load_passing(const A* from, int64_t count) {
  if constexpr (kVector) {
    Pack pack;
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
                 : "l"(from)
                 : "memory");
    return pack;
  } else {
    return cuda::load_pack<false>(from, count);
  }
}

// Lets the compiler forget which columns of the pack it has widened: while a block waits, a pack
// takes half of the registers.
__device__ __forceinline__ void keep_packed(Pack& pack) {
  asm volatile("" : "+r"(pack.word[0]), "+r"(pack.word[1]), "+r"(pack.word[2]), "+r"(pack.word[3]));
}

// Keeps a branch a branch, where the compiler would rather take both sides.
__device__ __forceinline__ void rarely() { asm volatile(""); }

// kCount weights from `from` on, of which `count` exist; the others are 0. Nothing writes them
// meanwhile. kVector: they are all there, on a border of 16 bytes. Volatile, or a loop over tokens
// would keep them in registers, which it needs for more.
template <int kCount, bool kVector>
__device__ __forceinline__ void load_weights(const float* from, int64_t count,
                                             float (&to)[kCount]) {
  if constexpr (kVector) {
#pragma unroll
    for (int k = 0; k < kCount; k += 4) {
      asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(to[k]), "=f"(to[k + 1]), "=f"(to[k + 2]), "=f"(to[k + 3])
                   : "l"(from + k));
    }
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) to[k] = k < count ? __ldg(from + k) : 0.0f;
  }
}

// The same from shared memory, where four of them lie at each at(q).
template <int kCount, class At>
__device__ __forceinline__ void take_weights(float (&to)[kCount], const At& at) {
#pragma unroll
  for (int q = 0; q < kCount / 4; ++q) {
    const float4 w = *at(q);
    to[4 * q] = w.x, to[4 * q + 1] = w.y, to[4 * q + 2] = w.z, to[4 * q + 3] = w.w;
  }
}

// The sum over the lanes of a warp, in every lane.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = cuda::kWarp / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(cuda::kAllLanes, x, distance);
  }
  return x;
}

// Sums over the lanes of each warp, kept for all threads.
template <int kCount>
struct WarpSums {
  float of_warp[kCount][kMostThreads / cuda::kWarp];

  __device__ __forceinline__ void put(const float (&sum)[kCount]) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float total = warp_sum(sum[k]);
      if (threadIdx.x % cuda::kWarp == 0) of_warp[k][threadIdx.x / cuda::kWarp] = total;
    }
  }
  // After a barrier, by a whole warp: the sum over the block, in every lane; of every warp there
  // are `of_each` sums.
  __device__ __forceinline__ float total(int k, int of_each = 1) const {
    const int lane = threadIdx.x % cuda::kWarp;
    const int count = static_cast<int>(blockDim.x) / cuda::kWarp * of_each;
    return warp_sum(lane < count ? of_warp[k][lane] : 0.0f);
  }
};

// --- image tokens: bytes, not values, so that a NaN keeps its payload ---

template <bool kVector, class A>
__device__ __forceinline__ void copy_row(const A* from, A* to, int64_t hidden) {
  if (from == to) return;
  for (int64_t at = threadIdx.x * kWidth<A>; at < hidden; at += blockDim.x * kWidth<A>) {
    cuda::store_pack<kVector>(to + at, cuda::load_pack<kVector>(from + at, hidden - at),
                              hidden - at);
  }
}

template <bool kVector, class A>
__device__ __forceinline__ void zero_row(A* to, int64_t hidden) {
  for (int64_t at = threadIdx.x * kWidth<A>; at < hidden; at += blockDim.x * kWidth<A>) {
    cuda::store_pack<kVector>(to + at, Pack{}, hidden - at);
  }
}

}  // namespace ehc::engram
