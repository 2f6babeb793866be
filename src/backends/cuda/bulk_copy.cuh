// Rows that the copy engine brings to shared memory, and the barriers in shared memory by which
// some warps of a block wait for it and for each other (sm_90+).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ehc::cuda {

// Whether this code is for the devices that have all of this.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
inline constexpr bool kIsSm90 = true;
#else
inline constexpr bool kIsSm90 = false;
#endif

// A barrier with phases: each ends once all have arrived and all announced bytes have come. Every
// lane that read or wrote what the others wait for arrives itself: racecheck knows no deputies.
class PhaseBarrier {
 public:
  // By one thread, before a barrier of the block.
  __device__ __forceinline__ void init(unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals)
                 : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  // Arrives and announces what `copy_row` will bring in this phase.
  __device__ __forceinline__ void arrive_expecting(unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }
  // Until a phase has ended: the first, third, ... for parity 0, the others for parity 1.
  __device__ __forceinline__ void wait(unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(address()),
        "r"(parity)
        : "memory");
  }
  [[nodiscard]] __device__ __forceinline__ uint32_t address() const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(&word_));
  }

 private:
  uint64_t word_;
};

// After `init`, by the thread that made the barriers: the copy engine sees them.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// `bytes`, `to` and `from` are multiples of 16; by one thread. What was read of `to` before must be
// known to this thread by a barrier.
__device__ __forceinline__ void copy_row(void* to, const void* from, unsigned bytes,
                                         const PhaseBarrier& arrived) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(from), "r"(bytes), "r"(arrived.address())
      : "memory");
}

// Position in a ring of stages, and the parity of the phase that their barriers are in.
struct Turn {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// --- warps with roles: registers of four neighbouring warps, all of which say so; only code for
// 90a can ---

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

}  // namespace ehc::cuda
