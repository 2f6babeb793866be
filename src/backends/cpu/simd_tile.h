// For tiles of sums in registers: sums over the lanes of several vectors at once, which takes a
// third of the steps of one after the other. The order of a sum is fixed, but another one than that
// of reduce_add.
#pragma once

#include "backends/cpu/simd.h"

namespace ehc::simd::EHC_ISA {
namespace {

// The compiler takes x for changed here: it stays in a register.
EHC_SIMD void keep(Vec& x) {
#if defined(__AVX2__)
  __asm__("" : "+v"(x));
#else
  static_cast<void>(x);
#endif
}

// Lane i of the result is the sum over the lanes of x[i], for i < kCount <= kLanes.
#if defined(__AVX512F__)
EHC_SIMD Vec add_quads(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vec cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  return add(low_doubles(ab, cd), high_doubles(ab, cd));  // a, b, c, d in each block of four
}
EHC_SIMD Vec add_blocks(Vec a, Vec b) {
  return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

template <int kCount>
EHC_SIMD Vec reduce_add_each(const Vec* x) {
  Vec quads[4];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const auto at = [&](int k) EHC_SIMD_LAMBDA { return k < kCount ? x[k] : zero(); };
    quads[i / 4] = i < kCount ? add_quads(at(i), at(i + 1), at(i + 2), at(i + 3)) : zero();
  }
  return add_blocks(add_blocks(quads[0], quads[1]), add_blocks(quads[2], quads[3]));
}
#elif defined(__AVX2__)
EHC_SIMD Vec add_quads(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const Vec cd = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  return add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
}

template <int kCount>
EHC_SIMD Vec reduce_add_each(const Vec* x) {
  const auto at = [&](int k) EHC_SIMD_LAMBDA { return k < kCount ? x[k] : zero(); };
  const Vec low = add_quads(at(0), at(1), at(2), at(3));
  const Vec high = kCount > 4 ? add_quads(at(4), at(5), at(6), at(7)) : zero();
  return add(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}
#else
template <int kCount>
EHC_SIMD Vec reduce_add_each(const Vec* x) {
  return each_lane([&](int i) { return i < kCount ? reduce_add(x[i]) : 0.0f; });
}
#endif

}  // namespace
}  // namespace ehc::simd::EHC_ISA
