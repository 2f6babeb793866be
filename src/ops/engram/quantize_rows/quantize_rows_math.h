// A group of values in the 8-bit format. The loops have no branches inside, so that compiled for an
// instruction set they become its vector code.
#pragma once

#include "ops/engram/shared/row_format.h"

namespace ehc::engram {

// A group that holds a NaN.
EHC_HD uint8_t encode_nan_group(int64_t group, uint8_t* weight) {
  for (int64_t i = 0; i < group; ++i) weight[i] = 0x7f;
  return 255;
}

// 2^-exponent. Products with it are exact, or far below the smallest weight.
EHC_HD float group_factor(int exponent) {
  return e8m0_to_float(static_cast<uint8_t>(127 - exponent));
}

EHC_HD float widened(float x) { return x; }
template <class Bf16>
EHC_HD float widened(Bf16 x) {
  return bf16_to_float(x.bits);
}

// Writes the weights and returns the scale.
template <class In>
EHC_HD uint8_t encode_group(const In* values, int64_t group, uint8_t* weight) {
  uint32_t amax = 0;  // magnitudes are ordered as their bits are, NaN last
  for (int64_t i = 0; i < group; ++i) {
    const uint32_t size = float_bits(widened(values[i])) & 0x7fffffffU;
    amax = size > amax ? size : amax;
  }
  if (amax > 0x7f800000U) return encode_nan_group(group, weight);
  const int exponent = group_exponent(amax);
  const float factor = group_factor(exponent);
  for (int64_t i = 0; i < group; ++i) weight[i] = encode_e4m3(widened(values[i]) * factor);
  return static_cast<uint8_t>(exponent + 127);
}

}  // namespace ehc::engram
