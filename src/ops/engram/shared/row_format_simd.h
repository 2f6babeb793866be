// Rows of the 8-bit format on SIMD lanes.
#pragma once

#include <type_traits>

#include "backends/cpu/simd.h"
#include "ops/engram/shared/row_format.h"

namespace ehc::engram::EHC_ISA {
namespace {

namespace simd = ehc::simd::EHC_ISA;

// A pair of e4m3 weights times 2^-8, natural order. Shifted into place they are fp16 numbers of
// that value, subnormals too; only NaN has another pattern there.
#if defined(__AVX512BW__)
EHC_SIMD simd::Pair load_e4m3(const uint8_t* p) {
  const __m512i bits =
      _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i all = _mm512_set1_epi16(0x7f);
  const __m512i size = _mm512_and_si512(bits, all);
  const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(bits, 8), _mm512_set1_epi16(-0x8000));
  const __m512i half = _mm512_mask_mov_epi16(
      _mm512_slli_epi16(size, 7), _mm512_cmpeq_epi16_mask(size, all), _mm512_set1_epi16(0x7e00));
  return simd::widen_f16(_mm512_or_si512(half, sign));
}

EHC_SIMD __m512i magnitude_bits(simd::Vec x) {
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}

// encode_e4m3() of 16 values.
EHC_SIMD __m128i encode_e4m3(simd::Vec x) {
  const __m512i size = magnitude_bits(x);
  const __m512i subnormal = _mm512_sub_epi32(
      _mm512_castps_si512(simd::add(_mm512_castsi512_ps(size), simd::splat(0x1p14F))),
      _mm512_set1_epi32(0x46800000));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(size, 20), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(size, _mm512_set1_epi32(0x7ffff)), odd);
  const __m512i normal =
      _mm512_sub_epi32(_mm512_srli_epi32(rounded, 20), _mm512_set1_epi32(120 << 3));
  const __mmask16 is_small = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(0x3c800000));
  const __m512i code =
      _mm512_min_epu32(_mm512_mask_mov_epi32(normal, is_small, subnormal), _mm512_set1_epi32(0x7e));
  const __m512i sign =
      _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(x), 24), _mm512_set1_epi32(0x80));
  return _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign));
}

// A pair in the order of rows of In.
template <class In>
EHC_SIMD void store_e4m3(uint8_t* p, simd::Pair x) {
  const simd::Pair natural = simd::natural_order<In>(x);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), encode_e4m3(natural.a));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), encode_e4m3(natural.b));
}
#elif defined(__AVX2__)
EHC_SIMD simd::Pair load_e4m3(const uint8_t* p) {
  const __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i all = _mm256_set1_epi16(0x7f);
  const __m256i size = _mm256_and_si256(bits, all);
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(bits, 8), _mm256_set1_epi16(-0x8000));
  const __m256i half = _mm256_blendv_epi8(_mm256_slli_epi16(size, 7), _mm256_set1_epi16(0x7e00),
                                          _mm256_cmpeq_epi16(size, all));
  return simd::widen_f16(_mm256_or_si256(half, sign));
}
#else
EHC_SIMD simd::Pair load_e4m3(const uint8_t* p) {
  float row[simd::kPair];
  for (int i = 0; i < simd::kPair; ++i) row[i] = e4m3_to_float(p[i]) * 0x1p-8F;
  return simd::load(row);
}
#endif

EHC_SIMD DType dtype_of(simd::Bf16) { return DType::bf16; }
EHC_SIMD DType dtype_of(simd::F16) { return DType::f16; }
EHC_SIMD DType dtype_of(float) { return DType::f32; }

// Stores values that Out holds exactly.
template <class Out>
EHC_SIMD void store_exact(Out* to, simd::Pair x, bool streaming) {
  simd::store_some(to, simd::lane_order<Out>(x), simd::kPair, streaming);
}
#if defined(__AVX512BW__)
template <>
EHC_SIMD void store_exact(simd::Bf16* to, simd::Pair x, bool streaming) {
  alignas(64) static constexpr uint16_t kUpperHalves[32] = {
      1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
      33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i bits = _mm512_permutex2var_epi16(
      _mm512_castps_si512(x.a), _mm512_load_si512(kUpperHalves), _mm512_castps_si512(x.b));
  if (streaming) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits);
  } else {
    _mm512_storeu_si512(to, bits);
  }
}
#endif

// Whole pairs of one group. A weight has four significant bits, so bf16 holds its product with a
// scale from 3 on: below, the smallest ones are no multiples of 2^-133.
template <class Out>
EHC_SIMD void decode_group(const uint8_t* weight, uint8_t scale, Out* to, int64_t width,
                           bool streaming) {
  if (scale == 255) {
    const simd::Vec nan = simd::splat(e8m0_to_float(255));
    for (int64_t i = 0; i < width; i += simd::kPair) {
      simd::store_some(to + i, simd::Pair{nan, nan}, simd::kPair, streaming);
    }
    return;
  }
  const simd::Vec factor = simd::splat(float_from_bits((scale + 8U) << 23));  // 2^(scale - 119)
  const bool exact = std::is_same_v<Out, simd::Bf16> && scale >= 3;
  for (int64_t i = 0; i < width; i += simd::kPair) {
    const simd::Pair x = simd::mul(load_e4m3(weight + i), factor);
    if (exact) {
      store_exact(to + i, x, streaming);
    } else {
      simd::store_some(to + i, simd::lane_order<Out>(x), simd::kPair, streaming);
    }
  }
}

// Groups of whole pairs, and scales whose 2^(scale - 119) is a float, take the vectors.
template <class Out>
inline void decode_row(const uint8_t* weight, const uint8_t* scale, Out* to, int64_t width,
                       int64_t group, bool streaming) {
  const bool whole = group % simd::kPair == 0;
  for (int64_t begin = 0; begin < width; begin += group, ++scale) {
    if (whole && (*scale <= 246 || *scale == 255)) {
      decode_group(weight + begin, *scale, to + begin, group, streaming);
    } else {
      for (int64_t i = begin; i < begin + group; ++i) {
        store_float(to, dtype_of(Out{}), i, decode_weight(weight[i], *scale));
      }
    }
  }
}

}  // namespace
}  // namespace ehc::engram::EHC_ISA
