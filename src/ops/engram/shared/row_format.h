// The 8-bit row format, value by value: e4m3fn weights and one ue8m0 scale per group.
#pragma once

#include "core/float_formats.h"

namespace ehc::engram {

// fp32 holds every product, or it overflows to inf. One pattern for NaN, whichever operand is one.
EHC_HD float decode_weight(uint8_t weight, uint8_t scale) {
  if (scale == 255) return e8m0_to_float(255);
  if ((weight & 0x7fU) == 0x7fU) return e4m3_to_float(weight);
  return e4m3_to_float(weight) * e8m0_to_float(scale);
}

// Smallest e with amax / 2^e <= 448 = 1.75 * 2^8, at least -127; by the bits of amax, not NaN.
EHC_HD int group_exponent(uint32_t amax_bits) {
  if (amax_bits == 0) return 0;
  if (amax_bits == 0x7f800000U) return 127;
  // A significand above 1.75 carries; of subnormals, low enough.
  const int exponent = static_cast<int>((amax_bits + 0x1fffffU) >> 23) - 127 - 8;
  return exponent < -127 ? -127 : exponent;
}

// Nearest even, saturating; not for NaN. Without branches, so that loops become vector code.
EHC_HD uint8_t encode_e4m3(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t size = bits & 0x7fffffffU;
  // Below 2^-6, adding 2^14 rounds to multiples of 2^-9.
  const uint32_t subnormal = float_bits(float_from_bits(size) + 0x1p14F) - 0x46800000U;
  const uint32_t normal = ((size + 0x7ffffU + (size >> 20 & 1U)) >> 20) - (120U << 3);
  const uint32_t code = size < 0x3c800000U ? subnormal : normal;
  return static_cast<uint8_t>((code > 0x7eU ? 0x7eU : code) | (bits >> 24 & 0x80U));
}

}  // namespace ehc::engram
