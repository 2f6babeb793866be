// Copies from global to shared memory that take no registers while they are on their way (sm_80+).
// What a thread awaits it may read; what others started it may read behind a barrier.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ehc::cuda {

// 16 bytes, or as many zeros where there is nothing; `from` must be an address all the same.
__device__ __forceinline__ void start_copy(void* to, const void* from, bool exists = true) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}

// 16 bytes under a condition, without a branch.
__device__ __forceinline__ void start_copy_if(bool condition, void* to, const void* from) {
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

// 4 bytes.
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

// The same of one group per buffer: until all but those of the last `buffers - 2` are there.
__device__ __forceinline__ void wait_for_buffer(int buffers) {
  if (buffers >= 4) return await_copies<2>();
  if (buffers == 3) return await_copies<1>();
  await_copies<0>();
}

}  // namespace ehc::cuda
