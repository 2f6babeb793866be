// A thread's packs on their way from global memory, in the order of their use: a ring of slots in
// shared memory that it alone fills and reads. Work comes in rounds (a token, say) of kItems packs.
// A slot takes the item kSlots further on as soon as its pack is in registers, so that the memory
// always has kSlots - 1 packs of each thread to bring, whatever the thread waits for.
#pragma once

#include "backends/cuda/async_copy.cuh"
#include "backends/cuda/pack.cuh"

namespace ehc::cuda {

template <int kItems, int kSlots, int kThreads>
class PackRing {
 public:
  static constexpr size_t kPacks = size_t{kSlots} * kThreads;  // of a block

  // `memory`: kPacks, those of a thread kThreads apart. fetch(ahead, item, to) starts the copy of
  // an item that exists, of the round that is `ahead` of the present one: known to the compiler.
  template <class Fetch>
  __device__ __forceinline__ PackRing(Pack* memory, const Fetch& fetch)
      : first_(memory + threadIdx.x) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      fetch(i / kItems, i % kItems, first_ + i * kThreads);
      commit_copies();
    }
  }
  // The items of a round in ascending order, all of them.
  template <class Fetch>
  __device__ __forceinline__ Pack take(int item, const Fetch& fetch) {
    await_copies<kSlots - 1>();
    int slot = base_ + item % kSlots;
    if (kItems % kSlots != 0 && slot >= kSlots) slot -= kSlots;
    Pack* of_slot = first_ + slot * kThreads;
    const Pack pack = *of_slot;
    fetch((item + kSlots) / kItems, (item + kSlots) % kItems, of_slot);
    commit_copies();
    return pack;
  }
  __device__ __forceinline__ void end_round() {
    if constexpr (kItems % kSlots != 0) {
      base_ += kItems % kSlots;
      if (base_ >= kSlots) base_ -= kSlots;
    }
  }

 private:
  Pack* first_;
  int base_ = 0;  // the slot of item 0
};

}  // namespace ehc::cuda
