// The hash once: keys by multiply and XOR, and an exact floored remainder by multiplication.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "ops/engram/hash/hash_args.h"

namespace ehc::engram {

// h_(k+1) = h_k XOR (w_k * m_k), wrapping.
EHC_HD uint64_t hash_step(uint64_t key, int32_t id, int64_t multiplier) {
  return key ^
         (static_cast<uint64_t>(static_cast<int64_t>(id)) * static_cast<uint64_t>(multiplier));
}

// What a remainder by `size` needs: floor((2^64 - 1) / size) and 2^64 mod size.
struct Divisor {
  uint64_t reciprocal;
  uint32_t size;
  uint32_t wrap;
};

EHC_HD Divisor make_divisor(int32_t size) {
  const auto s = static_cast<uint64_t>(size);
  const uint64_t reciprocal = ~uint64_t{0} / s;
  const uint64_t wrap = ~uint64_t{0} - reciprocal * s + 1;
  return {reciprocal, static_cast<uint32_t>(s), static_cast<uint32_t>(wrap == s ? 0 : wrap)};
}

EHC_HD uint64_t multiply_high(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  __extension__ using uint128 = unsigned __int128;
  return static_cast<uint64_t>((static_cast<uint128>(a) * b) >> 64);
#endif
}

// The non-negative remainder of the signed key. The estimated quotient is at most 2 too small:
// reciprocal > 2^64/size - 1 - 1/size, hence key*reciprocal/2^64 > key/size - 2.
EHC_HD uint32_t floored_remainder(uint64_t key, const Divisor& by) {
  uint64_t r = key - multiply_high(key, by.reciprocal) * by.size;
  r -= r >= by.size ? by.size : 0;
  r -= r >= by.size ? by.size : 0;
  if (key >> 63 != 0) r = r >= by.wrap ? r - by.wrap : r + by.size - by.wrap;
  return static_cast<uint32_t>(r);
}

EHC_HD int64_t hash_offset(const HashArgs& a, int64_t column) {
  return a.offsets_are_64 ? static_cast<const int64_t*>(a.offsets)[column]
                          : static_cast<const int32_t*>(a.offsets)[column];
}

EHC_HD void store_index(const HashArgs& a, int64_t at, int64_t index) {
  if (a.indices_are_64) {
    static_cast<int64_t*>(a.indices)[at] = index;
  } else {
    static_cast<int32_t*>(a.indices)[at] = static_cast<int32_t>(index);
  }
}

}  // namespace ehc::engram
