// Exact remainders of 8 divisors at once by AVX-512; included by hash_cpu.cc only.
//
// Divisor p >= 2^14, key u in [0, 2^64), all roundings towards zero: with f(u) <= u, g <= 1/p and
// q' = f(f(u) * g), q' <= u/p, and since each rounding loses less than 2^-52 of its value and g
// less than 2 * 2^-52, q' > u/p * (1 - 4 * 2^-52) > u/p - 2^64/p * 2^-50 >= u/p - 1.
// So the truncated q' is the quotient or one less, and u - q'*p lies in [0, 2p), below 2^32: the
// low 32 bits of a 32-bit product give it, and the smaller of r and r - p (mod 2^32) is the
// remainder. A divisor below 2^14 is first scaled by a power of two to P in [2^14, 2^15); the
// remainder r by P is below 2^15, where the same argument holds for p with room to spare.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "ops/engram/hash/hash_math.h"

namespace ehc::engram::EHC_ISA {
namespace {

inline constexpr int kToZero = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
inline constexpr int kDivisors = 8;

// Eight columns in the low halves of 64-bit lanes; lanes past the last column divide by 2^14.
struct DivisorGroup {
  __m512d reciprocal;        // of the scaled size, rounded down
  __m512d small_reciprocal;  // of the size
  __m512i scaled_size;
  __m512i size;
  __m512i wrap;    // 2^64 mod size
  __m512i offset;  // 64 bits
  bool has_small;
};

// Below 1/x by less than 2 * 2^-52 of it, whatever the rounding mode is.
[[gnu::always_inline]] inline double reciprocal_below(uint32_t x) {
  const double nearest = 1.0 / x;
  uint64_t bits = 0;
  std::memcpy(&bits, &nearest, sizeof bits);
  --bits;
  double below = 0;
  std::memcpy(&below, &bits, sizeof below);
  return below;
}

[[gnu::always_inline]] inline DivisorGroup make_group(const HashArgs& a, int64_t column,
                                                      int64_t count) {
  alignas(64) double reciprocal[kDivisors];
  alignas(64) double small_reciprocal[kDivisors];
  alignas(64) int64_t scaled[kDivisors];
  alignas(64) int64_t size[kDivisors];
  alignas(64) int64_t wrap[kDivisors];
  alignas(64) int64_t offset[kDivisors];
  DivisorGroup group;
  group.has_small = false;
  for (int64_t j = 0; j < kDivisors; ++j) {
    const Divisor by = make_divisor(j < count ? a.sizes[column + j] : 1 << 14);
    uint32_t multiple = by.size;
    while (multiple < 1U << 14) multiple *= 2;
    group.has_small = group.has_small || multiple != by.size;
    reciprocal[j] = reciprocal_below(multiple);
    small_reciprocal[j] = reciprocal_below(by.size);
    scaled[j] = multiple;
    size[j] = by.size;
    wrap[j] = by.wrap;
    offset[j] = j < count ? hash_offset(a, column + j) : 0;
  }
  group.reciprocal = _mm512_load_pd(reciprocal);
  group.small_reciprocal = _mm512_load_pd(small_reciprocal);
  group.scaled_size = _mm512_load_si512(scaled);
  group.size = _mm512_load_si512(size);
  group.wrap = _mm512_load_si512(wrap);
  group.offset = _mm512_load_si512(offset);
  return group;
}

// The low halves of the lanes hold key mod divisor; the high halves are unspecified.
[[gnu::always_inline]] inline __m512i reduce(__m512i key, __m512d reciprocal, __m512i divisor) {
  const __m512d estimate =
      _mm512_mul_round_pd(_mm512_cvt_roundepu64_pd(key, kToZero), reciprocal, kToZero);
  const __m512i product = _mm512_mul_epu32(_mm512_cvttpd_epu64(estimate), divisor);
  const __m512i r = _mm512_sub_epi32(key, product);
  return _mm512_min_epu32(r, _mm512_sub_epi32(r, divisor));
}

// Floored remainders plus offsets. kWide: whole 64-bit lanes, else their low halves.
template <bool kWide>
[[gnu::always_inline]] inline __m512i indices_of(uint64_t key, const DivisorGroup& by) {
  __m512i r = reduce(_mm512_set1_epi64(static_cast<int64_t>(key)), by.reciprocal, by.scaled_size);
  const __m512i low = _mm512_set1_epi64(0xffffffff);
  if (by.has_small) r = reduce(_mm512_and_si512(r, low), by.small_reciprocal, by.size);
  if (key >> 63 != 0) [[unlikely]] {
    r = _mm512_sub_epi32(r, by.wrap);
    r = _mm512_min_epu32(r, _mm512_add_epi32(r, by.size));
  }
  if constexpr (kWide) return _mm512_add_epi64(_mm512_and_si512(r, low), by.offset);
  return _mm512_add_epi32(r, by.offset);
}

template <class Index>
[[gnu::always_inline]] inline void store_indices(Index* out, __m512i values, __mmask8 lanes) {
  if constexpr (sizeof(Index) == 8) {
    _mm512_mask_storeu_epi64(out, lanes, values);
  } else {
    _mm512_mask_cvtepi64_storeu_epi32(out, lanes, values);
  }
}

}  // namespace
}  // namespace ehc::engram::EHC_ISA
