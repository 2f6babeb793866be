// engram.quantize_rows: e4m3fn weights and one ue8m0 scale for each group of values.
// values [rows, hd], weight [rows, hd], scale [rows, hd/group]
//
// Bytes: hd elements read, hd + hd/group written a row. Two passes over a group, the second from
// the first-level cache: the largest magnitude, then scaled and rounded values. Values are
// prefetched, because the arithmetic is too slow for the processor to look far ahead. Class E.
#include "ops/engram/quantize_rows/quantize_rows_args.h"
#include "ops/engram/quantize_rows/quantize_rows_math.h"
#include "ops/engram/shared/row_format_simd.h"

namespace ehc::engram::EHC_ISA {

namespace {

// encode_group() for a group of whole pairs.
#if defined(__AVX512BW__)
template <class In>
EHC_SIMD uint8_t encode_pairs(const In* values, int64_t group, uint8_t* weight) {
  __m512i largest = _mm512_setzero_si512();
  for (int64_t i = 0; i < group; i += simd::kPair) {
    const simd::Pair x = simd::load(values + i);
    largest = _mm512_max_epi32(largest, magnitude_bits(x.a));
    largest = _mm512_max_epi32(largest, magnitude_bits(x.b));
  }
  const auto amax = static_cast<uint32_t>(_mm512_reduce_max_epi32(largest));
  if (amax > 0x7f800000U) return encode_nan_group(group, weight);
  const int exponent = group_exponent(amax);
  const simd::Vec factor = simd::splat(group_factor(exponent));
  for (int64_t i = 0; i < group; i += simd::kPair) {
    store_e4m3<In>(weight + i, simd::mul(simd::load(values + i), factor));
  }
  return static_cast<uint8_t>(exponent + 127);
}
#else
template <class In>
EHC_SIMD uint8_t encode_pairs(const In* values, int64_t group, uint8_t* weight) {
  return encode_group(values, group, weight);
}
#endif

template <class In>
inline void encode_range(const QuantizeRowsArgs& a, int64_t begin, int64_t end) {
  constexpr int64_t kAhead = 4096, kLine = 64 / sizeof(In);
  const bool whole = a.group % simd::kPair == 0;
  for (int64_t r = begin; r < end; ++r) {
    const In* values = static_cast<const In*>(a.values) + r * a.values_stride;
    uint8_t* weight = a.weight + r * a.weight_stride;
    uint8_t* scale = a.scale + r * a.scale_stride;
    for (int64_t i = 0; i < a.width; i += a.group) {
      for (int64_t j = i; j < i + a.group; j += kLine) simd::prefetch(values + j + kAhead);
      *scale++ = whole ? encode_pairs(values + i, a.group, weight + i)
                       : encode_group(values + i, a.group, weight + i);
    }
  }
}

}  // namespace

void encode_rows(const QuantizeRowsArgs& a, int64_t begin, int64_t end) {
  if (a.type == DType::f32) {
    encode_range<float>(a, begin, end);
  } else {
    encode_range<simd::Bf16>(a, begin, end);
  }
}

}  // namespace ehc::engram::EHC_ISA
