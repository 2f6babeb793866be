// simd.h for AVX-512 (x86-64-v4), with the BF16 conversion where the target has it.
#pragma once

#include <immintrin.h>

#include "backends/cpu/simd_types.h"

namespace ehc::simd::EHC_ISA {
namespace {

using Vec = __m512;
inline constexpr int kLanes = 16;
// Pairs worth taking through a long computation step by step together.
inline constexpr int kPairsTogether = 4;
// Whether there are load_raw and add_products: bf16 products summed in fp32 by one instruction.
#if defined(__AVX512BF16__)
inline constexpr bool kBf16Products = true;
#else
inline constexpr bool kBf16Products = false;
#endif
struct Pair {
  Vec a, b;
};

EHC_SIMD Vec zero() { return _mm512_setzero_ps(); }
EHC_SIMD Vec splat(float x) { return _mm512_set1_ps(x); }
EHC_SIMD float first_lane(Vec x) { return _mm512_cvtss_f32(x); }
EHC_SIMD Vec add(Vec x, Vec y) { return _mm512_add_ps(x, y); }
EHC_SIMD Vec sub(Vec x, Vec y) { return _mm512_sub_ps(x, y); }
EHC_SIMD Vec mul(Vec x, Vec y) { return _mm512_mul_ps(x, y); }
EHC_SIMD Vec div(Vec x, Vec y) { return _mm512_div_ps(x, y); }
EHC_SIMD Vec fma(Vec x, Vec y, Vec z) { return _mm512_fmadd_ps(x, y, z); }
EHC_SIMD Vec minus_magnitude(Vec x) { return _mm512_or_ps(x, splat(-0.0f)); }
// The instructions return their second operand when either is NaN.
EHC_SIMD Vec max_keep_nan(Vec bound, Vec x) { return _mm512_max_ps(bound, x); }
EHC_SIMD Vec min_or_second(Vec x, Vec y) { return _mm512_min_ps(x, y); }
EHC_SIMD bool all_at_least(Vec x, float bound) {
  return _mm512_cmp_ps_mask(x, splat(bound), _CMP_GE_OQ) == 0xffff;
}
// -min(|x|, bound); -bound for NaN.
EHC_SIMD Vec minus_magnitude(Vec x, float bound) {
  constexpr int kSmallerMagnitude = 2, kNegative = 3 << 2;
  return _mm512_range_ps(x, splat(bound), kSmallerMagnitude | kNegative);
}
// Lanes of `x` with the sign bit set take `negative`.
EHC_SIMD Vec select_negative(Vec x, Vec negative, Vec positive) {
  return _mm512_mask_mov_ps(positive, _mm512_movepi32_mask(_mm512_castps_si512(x)), negative);
}
// x * factor in lanes with the sign bit of x set.
EHC_SIMD Vec scale_negative(Vec x, Vec factor) {
  return _mm512_mask_mul_ps(x, _mm512_movepi32_mask(_mm512_castps_si512(x)), x, factor);
}
// 2^f for the fraction f of k, whose last kPowerBits bits are the lowest of `shifted`.
inline constexpr int kPowerBits = 3;
EHC_SIMD Vec power_of_fraction(Vec shifted) {
  return _mm512_permutexvar_ps(_mm512_castps_si512(shifted), _mm512_load_ps(kPowers));
}
// x * 2^floor(k) for k in -151 .. 0
template <int kBits>
EHC_SIMD Vec scale_down(Vec x, Vec k, Vec) {
  return _mm512_scalef_ps(x, k);
}

// The parts of 2^x for any x, which is 2^(j/32) * 2^fraction_of_32nds(x) * 2^floor(x) with j the
// last bits of floor_of_32nds(x). Overflow gives infinity, underflow subnormals and zero.
inline constexpr bool kHasPowerParts = true;
EHC_SIMD Vec floor_of_32nds(Vec x) {
  const Vec shift = splat(0x1.8p18f);
  return _mm512_add_round_ps(x, shift, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
EHC_SIMD Vec fraction_of_32nds(Vec x) {
  constexpr int kBits = 5 << 4;
  return _mm512_reduce_ps(x, kBits | _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
EHC_SIMD Vec power_of_32nds(Vec floored) {
  return _mm512_permutex2var_ps(_mm512_load_ps(kPowersOf32nds), _mm512_castps_si512(floored),
                                _mm512_load_ps(kPowersOf32nds + 16));
}
EHC_SIMD Vec scale_by_power(Vec y, Vec x) { return _mm512_scalef_ps(y, x); }

EHC_SIMD float reduce_add(Vec x) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

EHC_SIMD Vec low_doubles(Vec x, Vec y) {
  return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
}
EHC_SIMD Vec high_doubles(Vec x, Vec y) {
  return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
}

// Lane i of vector j becomes lane j of vector i.
EHC_SIMD void transpose(Vec* x) {
  Vec pairs[16], quads[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  // quads[i + k]: in its block b of four lanes, column 4b + k of rows i .. i + 3
  for (int i = 0; i < 16; i += 4) {
    quads[i] = low_doubles(pairs[i], pairs[i + 2]);
    quads[i + 1] = high_doubles(pairs[i], pairs[i + 2]);
    quads[i + 2] = low_doubles(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = high_doubles(pairs[i + 1], pairs[i + 3]);
  }
  constexpr int kEven = 0x88, kOdd = 0xdd;  // blocks 0 and 2, or 1 and 3, of both
  for (int k = 0; k < 4; ++k) {
    const Vec even = _mm512_shuffle_f32x4(quads[k], quads[4 + k], kEven);
    const Vec odd = _mm512_shuffle_f32x4(quads[k], quads[4 + k], kOdd);
    const Vec even_below = _mm512_shuffle_f32x4(quads[8 + k], quads[12 + k], kEven);
    const Vec odd_below = _mm512_shuffle_f32x4(quads[8 + k], quads[12 + k], kOdd);
    x[k] = _mm512_shuffle_f32x4(even, even_below, kEven);
    x[4 + k] = _mm512_shuffle_f32x4(odd, odd_below, kEven);
    x[8 + k] = _mm512_shuffle_f32x4(even, even_below, kOdd);
    x[12 + k] = _mm512_shuffle_f32x4(odd, odd_below, kOdd);
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

EHC_SIMD uint32_t first_lanes(int count) {  // count <= 32
  return count >= 32 ? ~0u : (1u << count) - 1;
}

// --- fp32 ---

EHC_SIMD Pair load(const float* p) { return {_mm512_loadu_ps(p), _mm512_loadu_ps(p + 16)}; }

EHC_SIMD Pair load_tail(const float* p, int count) {
  const uint32_t lanes = first_lanes(count);
  const auto low = static_cast<__mmask16>(lanes), high = static_cast<__mmask16>(lanes >> 16);
  return {_mm512_maskz_loadu_ps(low, p), _mm512_maskz_loadu_ps(high, p + 16)};
}

EHC_SIMD void store(float* p, Pair x) {
  _mm512_storeu_ps(p, x.a);
  _mm512_storeu_ps(p + 16, x.b);
}

EHC_SIMD void store_tail(float* p, Pair x, int count) {
  const uint32_t lanes = first_lanes(count);
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>(lanes), x.a);
  _mm512_mask_storeu_ps(p + 16, static_cast<__mmask16>(lanes >> 16), x.b);
}

EHC_SIMD void stream(float* p, Pair x) {
  _mm512_stream_ps(p, x.a);
  _mm512_stream_ps(p + 16, x.b);
}

// --- bf16 ---

EHC_SIMD Pair widen_bf16(__m512i x) {
  const __m512i none = _mm512_setzero_si512();
  return {_mm512_castsi512_ps(_mm512_unpacklo_epi16(none, x)),
          _mm512_castsi512_ps(_mm512_unpackhi_epi16(none, x))};
}

EHC_SIMD Pair load(const Bf16* p) { return widen_bf16(_mm512_loadu_si512(p)); }

EHC_SIMD Pair load_tail(const Bf16* p, int count) {
  return widen_bf16(_mm512_maskz_loadu_epi16(first_lanes(count), p));
}

#if defined(__AVX512BF16__)
EHC_SIMD __m512bh load_raw(const Bf16* p, int64_t count) {
  const __m512i bits = count >= 32
                           ? _mm512_loadu_si512(p)
                           : _mm512_maskz_loadu_epi16(first_lanes(static_cast<int>(count)), p);
  __m512bh packed;
  std::memcpy(&packed, &bits, sizeof packed);
  return packed;
}

// Lane i takes elements 2i and 2i + 1; subnormal products and sums become zero.
EHC_SIMD Pair add_products(Pair sum, __m512bh x, __m512bh y) {
  return {_mm512_dpbf16_ps(sum.a, x, y), sum.b};
}
#endif

// The upper 16 bits are those of the nearest bf16; not for NaN.
EHC_SIMD __m512i round_to_upper_half(Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __m512i sum = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  return _mm512_mask_add_epi32(sum, odd, sum, _mm512_set1_epi32(1));
}

EHC_SIMD __m512i narrow_bf16_by_integers(Pair x) {
  __m512i a = round_to_upper_half(x.a), b = round_to_upper_half(x.b);
  if (_mm512_cmp_ps_mask(x.a, x.b, _CMP_UNORD_Q)) [[unlikely]] {
    const __m512i quiet = _mm512_set1_epi32(0x400000);
    a = _mm512_mask_or_epi32(a, _mm512_cmp_ps_mask(x.a, x.a, _CMP_UNORD_Q),
                             _mm512_castps_si512(x.a), quiet);
    b = _mm512_mask_or_epi32(b, _mm512_cmp_ps_mask(x.b, x.b, _CMP_UNORD_Q),
                             _mm512_castps_si512(x.b), quiet);
  }
  return _mm512_packus_epi32(_mm512_srli_epi32(a, 16), _mm512_srli_epi32(b, 16));
}

EHC_SIMD __m512i narrow_bf16(Pair x) {
#if defined(__AVX512BF16__)
  const __m512bh packed = _mm512_cvtne2ps_pbh(x.b, x.a);
  __m512i bits;
  std::memcpy(&bits, &packed, sizeof bits);
  // The instruction takes subnormals for zero: look again wherever it gave one.
  if (_mm512_testn_epi16_mask(bits, _mm512_set1_epi16(0x7fff)) == 0) [[likely]] {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bits);
  }
#endif
  return narrow_bf16_by_integers(x);
}

EHC_SIMD void store(Bf16* p, Pair x) { _mm512_storeu_si512(p, narrow_bf16(x)); }

EHC_SIMD void store_tail(Bf16* p, Pair x, int count) {
  _mm512_mask_storeu_epi16(p, first_lanes(count), narrow_bf16(x));
}

EHC_SIMD void stream(Bf16* p, Pair x) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), narrow_bf16(x));
}

// --- fp16 ---

EHC_SIMD Pair widen_f16(__m512i x) {
  return {_mm512_cvtph_ps(_mm512_castsi512_si256(x)),
          _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1))};
}

EHC_SIMD Pair load(const F16* p) { return widen_f16(_mm512_loadu_si512(p)); }

EHC_SIMD Pair load_tail(const F16* p, int count) {
  return widen_f16(_mm512_maskz_loadu_epi16(first_lanes(count), p));
}

EHC_SIMD __m512i narrow_f16(Pair x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(x.a, kNearest)),
                            _mm512_cvtps_ph(x.b, kNearest), 1);
}

EHC_SIMD void store(F16* p, Pair x) { _mm512_storeu_si512(p, narrow_f16(x)); }

EHC_SIMD void store_tail(F16* p, Pair x, int count) {
  _mm512_mask_storeu_epi16(p, first_lanes(count), narrow_f16(x));
}

EHC_SIMD void stream(F16* p, Pair x) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), narrow_f16(x));
}

// --- fp32 rows in the order of Bf16 ---

EHC_SIMD Pair to_bf16_order(Pair x) {
  return {_mm512_shuffle_f32x4(x.a, x.b, 0x88), _mm512_shuffle_f32x4(x.a, x.b, 0xdd)};
}

EHC_SIMD Pair from_bf16_order(Pair x) {
  const Vec low = _mm512_shuffle_f32x4(x.a, x.b, 0x44);
  const Vec high = _mm512_shuffle_f32x4(x.a, x.b, 0xee);
  return {_mm512_shuffle_f32x4(low, low, 0xd8), _mm512_shuffle_f32x4(high, high, 0xd8)};
}

}  // namespace
}  // namespace ehc::simd::EHC_ISA
