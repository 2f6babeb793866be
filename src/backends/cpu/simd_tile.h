// For tiles of sums in registers whose lanes are four columns of kFours rows: next to no additions
// over lanes are left, and one load brings four columns to all rows.
//
//   load_vec, store_vec   kLanes floats
//   broadcast_four    the same four floats for each row
//   transpose_fours   kFours vectors of kFours fours
//   add_fours         sums over the fours of up to four vectors: lane kFours * i + r is row r of
//                     vector i
#pragma once

#include "backends/cpu/simd.h"

namespace ehc::simd::EHC_ISA {
namespace {

// Fours of a vector.
inline constexpr int kFours = kLanes / 4;

// Where a pair of vectors in the lane order of A has the q-th four columns.
template <class A>
constexpr int place_of_four(int q) {
#if defined(__AVX2__)
  if (std::is_same_v<A, Bf16>) return q / 2 + q % 2 * kFours;
#endif
  return q;
}

// sum += x * y, rounded once, in the register where the sum is: compilers that write another one
// copy sums back, and copies take the place of products.
EHC_SIMD void add_product(Vec& sum, const Vec& x, const Vec& y) {
#if defined(__AVX2__)
  __asm__("vfmadd231ps %1, %2, %0" : "+v"(sum) : "v"(x), "v"(y));
#else
  sum = fma(x, y, sum);
#endif
}

#if defined(__AVX512F__)
EHC_SIMD Vec load_vec(const float* p) { return _mm512_loadu_ps(p); }
EHC_SIMD void store_vec(float* p, Vec x) { _mm512_storeu_ps(p, x); }

EHC_SIMD Vec broadcast_four(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }

EHC_SIMD void transpose_fours(Vec* x) {
  constexpr int kLow = 0x44, kHigh = 0xee, kEven = 0x88, kOdd = 0xdd;
  const Vec low = _mm512_shuffle_f32x4(x[0], x[1], kLow);
  const Vec high = _mm512_shuffle_f32x4(x[0], x[1], kHigh);
  const Vec low_below = _mm512_shuffle_f32x4(x[2], x[3], kLow);
  const Vec high_below = _mm512_shuffle_f32x4(x[2], x[3], kHigh);
  x[0] = _mm512_shuffle_f32x4(low, low_below, kEven);
  x[1] = _mm512_shuffle_f32x4(low, low_below, kOdd);
  x[2] = _mm512_shuffle_f32x4(high, high_below, kEven);
  x[3] = _mm512_shuffle_f32x4(high, high_below, kOdd);
}

EHC_SIMD Vec add_fours(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vec cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const Vec rows = add(low_doubles(ab, cd), high_doubles(ab, cd));  // a, b, c, d in each four
  return _mm512_permutexvar_ps(
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), rows);
}
#elif defined(__AVX2__)
EHC_SIMD Vec load_vec(const float* p) { return _mm256_loadu_ps(p); }
EHC_SIMD void store_vec(float* p, Vec x) { _mm256_storeu_ps(p, x); }

EHC_SIMD Vec broadcast_four(const float* p) {
  return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
}

EHC_SIMD void transpose_fours(Vec* x) {
  const Vec low = _mm256_permute2f128_ps(x[0], x[1], 0x20);
  x[1] = _mm256_permute2f128_ps(x[0], x[1], 0x31);
  x[0] = low;
}

EHC_SIMD Vec add_fours(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const Vec cd = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const Vec rows = add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  return _mm256_permutevar8x32_ps(rows, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
#else
EHC_SIMD Vec load_vec(const float* p) {
  return each_lane([&](int i) { return p[i]; });
}
EHC_SIMD void store_vec(float* p, const Vec& x) { std::memcpy(p, x.lane, sizeof x.lane); }

EHC_SIMD Vec broadcast_four(const float* p) {
  return each_lane([&](int i) { return p[i % 4]; });
}

EHC_SIMD void transpose_fours(Vec* x) {
  Vec from[kFours];
  for (int r = 0; r < kFours; ++r) from[r] = x[r];
  for (int q = 0; q < kFours; ++q) {
    x[q] = each_lane([&](int i) { return from[i / 4].lane[4 * q + i % 4]; });
  }
}

EHC_SIMD Vec add_fours(const Vec& a, const Vec& b, const Vec& c, const Vec& d) {
  const Vec* const x[] = {&a, &b, &c, &d};
  return each_lane([&](int i) {
    const float* four = x[i / kFours]->lane + i % kFours * 4;
    return (four[0] + four[1]) + (four[2] + four[3]);
  });
}
#endif

}  // namespace
}  // namespace ehc::simd::EHC_ISA
