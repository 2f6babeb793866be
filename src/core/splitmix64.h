// SplitMix64 as a function of position.
#pragma once

#include <cstdint>

namespace ehc {

// Output `index` (from 0) of the SplitMix64 stream that starts at `seed`.
constexpr uint64_t splitmix64(uint64_t seed, uint64_t index) {
  uint64_t word = seed + 0x9e3779b97f4a7c15U * (index + 1);
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9U;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebU;
  return word ^ (word >> 31);
}

}  // namespace ehc
