// Copies of 16 bytes from global to shared memory that a thread starts, awaits and reads alone: no
// registers are taken and no barrier is needed while they are on their way (sm_80+).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backends/cuda/pack.cuh"

namespace ehc::cuda {

__device__ __forceinline__ void start_copy(Pack* to, const void* from) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}

// The same under a condition, without a branch.
__device__ __forceinline__ void start_copy_if(bool condition, Pack* to, const void* from) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile(
      "{\n"
      ".reg .pred starts;\n"
      "setp.ne.u32 starts, %2, 0;\n"
      "@starts cp.async.cg.shared.global [%0], [%1], 16;\n"
      "}" ::"r"(address),
      "l"(from), "r"(static_cast<uint32_t>(condition))
      : "memory");
}

// The same for 4 bytes.
__device__ __forceinline__ void start_copy_word(float* to, const float* from) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
}

// Closes a group of copies, which may be empty.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of the groups are on their way.
template <int kPending>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace ehc::cuda
