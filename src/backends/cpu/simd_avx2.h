// simd.h for AVX2 with FMA and F16C (x86-64-v3).
#pragma once

#include <immintrin.h>

#include "backends/cpu/simd_types.h"

namespace ehc::simd::EHC_ISA {
namespace {

using Vec = __m256;
inline constexpr int kLanes = 8;
// Pairs worth taking through a long computation step by step together.
inline constexpr int kPairsTogether = 2;
// Whether there are load_raw and add_products: bf16 products summed in fp32 by one instruction.
inline constexpr bool kBf16Products = false;
struct Pair {
  Vec a, b;
};

EHC_SIMD Vec zero() { return _mm256_setzero_ps(); }
EHC_SIMD Vec splat(float x) { return _mm256_set1_ps(x); }
EHC_SIMD float first_lane(Vec x) { return _mm256_cvtss_f32(x); }
EHC_SIMD Vec add(Vec x, Vec y) { return _mm256_add_ps(x, y); }
EHC_SIMD Vec sub(Vec x, Vec y) { return _mm256_sub_ps(x, y); }
EHC_SIMD Vec mul(Vec x, Vec y) { return _mm256_mul_ps(x, y); }
EHC_SIMD Vec div(Vec x, Vec y) { return _mm256_div_ps(x, y); }
EHC_SIMD Vec fma(Vec x, Vec y, Vec z) { return _mm256_fmadd_ps(x, y, z); }
EHC_SIMD Vec minus_magnitude(Vec x) { return _mm256_or_ps(x, splat(-0.0f)); }
// The instructions return their second operand when either is NaN.
EHC_SIMD Vec max_keep_nan(Vec bound, Vec x) { return _mm256_max_ps(bound, x); }
EHC_SIMD Vec min_or_second(Vec x, Vec y) { return _mm256_min_ps(x, y); }
EHC_SIMD bool all_at_least(Vec x, float bound) {
  return _mm256_movemask_ps(_mm256_cmp_ps(x, splat(bound), _CMP_GE_OQ)) == 0xff;
}
// -min(|x|, bound); -bound for NaN.
EHC_SIMD Vec minus_magnitude(Vec x, float bound) {
  return _mm256_max_ps(minus_magnitude(x), splat(-bound));
}
// Lanes of `x` with the sign bit set take `negative`.
EHC_SIMD Vec select_negative(Vec x, Vec negative, Vec positive) {
  return _mm256_blendv_ps(positive, negative, x);
}
// x * factor in lanes with the sign bit of x set.
EHC_SIMD Vec scale_negative(Vec x, Vec factor) { return select_negative(x, mul(x, factor), x); }

// 2^f for the fraction f of k, whose last kPowerBits bits are the lowest of `shifted`.
inline constexpr int kPowerBits = 3;
inline constexpr bool kHasPowerParts = false;
EHC_SIMD Vec power_of_fraction(Vec shifted) {
  return _mm256_permutevar8x32_ps(_mm256_load_ps(kPowers), _mm256_castps_si256(shifted));
}

// x * 2^floor(k) for k in -151 .. 0, by way of 2^(floor(k) + 64), so that a subnormal result is
// rounded once. `shifted` holds k in its low bits; those above leave at the top.
template <int kBits>
EHC_SIMD Vec scale_down(Vec x, Vec, Vec shifted) {
  const __m256i exponent =
      _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32((127 + 64) << kBits));
  const __m256i power = _mm256_slli_epi32(_mm256_srli_epi32(exponent, kBits), 23);
  return mul(mul(x, _mm256_castsi256_ps(power)), splat(0x1p-64f));
}

EHC_SIMD float reduce_add(Vec x) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// Lane i of vector j becomes lane j of vector i.
EHC_SIMD void transpose(Vec* x) {
  Vec pairs[8], quads[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  // quads[i + k]: in its block b of four lanes, column 4b + k of rows i .. i + 3
  for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int k = 0; k < 4; ++k) {
    x[k] = _mm256_permute2f128_ps(quads[k], quads[4 + k], 0x20);
    x[4 + k] = _mm256_permute2f128_ps(quads[k], quads[4 + k], 0x31);
  }
}

EHC_SIMD void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
EHC_SIMD void prefetch_near(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
// Streaming stores want rows that start on a cache line.
EHC_SIMD bool can_stream(const void* row) { return reinterpret_cast<uintptr_t>(row) % 64 == 0; }
// Orders streaming stores before whatever tells other threads that the output is there.
EHC_SIMD void stream_fence() { _mm_sfence(); }

// --- fp32 ---

EHC_SIMD Pair load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }

EHC_SIMD Pair load_tail(const float* p, int count) {
  alignas(32) float buffer[16] = {};
  for (int i = 0; i < count; ++i) buffer[i] = p[i];
  return load(buffer);
}

EHC_SIMD void store(float* p, Pair x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}

EHC_SIMD void store_tail(float* p, Pair x, int count) {
  alignas(32) float buffer[16];
  store(buffer, x);
  for (int i = 0; i < count; ++i) p[i] = buffer[i];
}

EHC_SIMD void stream(float* p, Pair x) {
  _mm256_stream_ps(p, x.a);
  _mm256_stream_ps(p + 8, x.b);
}

// --- 16-bit types ---

EHC_SIMD __m256i load_halves(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

template <class A>
EHC_SIMD __m256i load_halves_tail(const A* p, int count) {
  alignas(32) A buffer[16] = {};
  for (int i = 0; i < count; ++i) buffer[i] = p[i];
  return load_halves(buffer);
}

EHC_SIMD void store_halves(void* p, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }

template <class A>
EHC_SIMD void store_halves_tail(A* p, __m256i x, int count) {
  alignas(32) A buffer[16];
  store_halves(buffer, x);
  for (int i = 0; i < count; ++i) p[i] = buffer[i];
}

EHC_SIMD void stream_halves(void* p, __m256i x) {
  _mm256_stream_si256(static_cast<__m256i*>(p), x);
}

// --- bf16 ---

EHC_SIMD Pair widen_bf16(__m256i x) {
  const __m256i none = _mm256_setzero_si256();
  return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(none, x)),
          _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, x))};
}

// The upper 16 bits are those of the nearest bf16; not for NaN.
EHC_SIMD __m256i round_to_upper_half(Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}

EHC_SIMD __m256i keep_nan(__m256i rounded, Vec x) {
  const Vec quiet = _mm256_or_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x400000)));
  return _mm256_castps_si256(
      _mm256_blendv_ps(_mm256_castsi256_ps(rounded), quiet, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}

EHC_SIMD __m256i narrow_bf16(Pair x) {
  __m256i a = round_to_upper_half(x.a), b = round_to_upper_half(x.b);
  if (_mm256_movemask_ps(_mm256_cmp_ps(x.a, x.b, _CMP_UNORD_Q))) [[unlikely]] {
    a = keep_nan(a, x.a);
    b = keep_nan(b, x.b);
  }
  return _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
}

EHC_SIMD Pair load(const Bf16* p) { return widen_bf16(load_halves(p)); }
EHC_SIMD Pair load_tail(const Bf16* p, int count) { return widen_bf16(load_halves_tail(p, count)); }
EHC_SIMD void store(Bf16* p, Pair x) { store_halves(p, narrow_bf16(x)); }
EHC_SIMD void store_tail(Bf16* p, Pair x, int count) {
  store_halves_tail(p, narrow_bf16(x), count);
}
EHC_SIMD void stream(Bf16* p, Pair x) { stream_halves(p, narrow_bf16(x)); }

// --- fp16 ---

EHC_SIMD Pair widen_f16(__m256i x) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}

EHC_SIMD __m256i narrow_f16(Pair x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return _mm256_set_m128i(_mm256_cvtps_ph(x.b, kNearest), _mm256_cvtps_ph(x.a, kNearest));
}

EHC_SIMD Pair load(const F16* p) { return widen_f16(load_halves(p)); }
EHC_SIMD Pair load_tail(const F16* p, int count) { return widen_f16(load_halves_tail(p, count)); }
EHC_SIMD void store(F16* p, Pair x) { store_halves(p, narrow_f16(x)); }
EHC_SIMD void store_tail(F16* p, Pair x, int count) { store_halves_tail(p, narrow_f16(x), count); }
EHC_SIMD void stream(F16* p, Pair x) { stream_halves(p, narrow_f16(x)); }

// --- fp32 rows in the order of Bf16 ---

// Swaps the middle groups of four; its own inverse.
EHC_SIMD Pair to_bf16_order(Pair x) {
  return {_mm256_permute2f128_ps(x.a, x.b, 0x20), _mm256_permute2f128_ps(x.a, x.b, 0x31)};
}
EHC_SIMD Pair from_bf16_order(Pair x) { return to_bf16_order(x); }

}  // namespace
}  // namespace ehc::simd::EHC_ISA
