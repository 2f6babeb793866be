// Clusters: blocks on neighbouring processors that wait for each other and write to each other's
// shared memory (sm_90+; kernels for other devices compile, but must not be launched).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backends/cuda/launch.cuh"

namespace ehc::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define EHC_HAS_CLUSTERS 1
#endif

// Of this block in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
#ifdef EHC_HAS_CLUSTERS
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// The two halves of a barrier of all threads of a cluster: what they wrote to shared memory before
// they arrived is there after the wait.
__device__ __forceinline__ void arrive_at_cluster() {
#ifdef EHC_HAS_CLUSTERS
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#ifdef EHC_HAS_CLUSTERS
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void sync_cluster() {
  arrive_at_cluster();
  wait_for_cluster();
}

// Stores to the variable of block `rank` that is `to` in this one.
__device__ __forceinline__ void store_to_block(float* to, unsigned rank, float x) {
#ifdef EHC_HAS_CLUSTERS
  const auto own = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  uint32_t address = 0;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
#endif
}

// The variable of block `rank` that is `from` in this one.
__device__ __forceinline__ float load_from_block(const float* from, unsigned rank) {
  float x = 0;
#ifdef EHC_HAS_CLUSTERS
  const auto own = static_cast<uint32_t>(__cvta_generic_to_shared(from));
  uint32_t address = 0;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
#endif
  return x;
}

// Whether the code that this device runs has clusters: it is the same as can overlap.
inline bool has_clusters(int device) { return can_overlap(device); }

// `grid` is a multiple of `blocks_of_cluster`. `overlaps`: as launch_overlapping, for small grids.
template <class... Params, class... Values>
void launch_clusters(const char* name, int device, void* stream, void (*kernel)(Params...),
                     dim3 grid, unsigned blocks_of_cluster, dim3 block, size_t shared_bytes,
                     bool overlaps, Values... values) {
  const DeviceGuard guard(device);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = blocks_of_cluster;
  attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = overlaps ? 2 : 1;
  check(name, cudaLaunchKernelEx(&config, kernel, static_cast<Params>(values)...));
}

}  // namespace ehc::cuda
