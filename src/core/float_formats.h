// Scalar conversions between fp32/fp64 and the storage formats, host and device. Rounding is to
// nearest even, NaN stays NaN, subnormals are kept.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/host_device.h"
#include "ehc/dtype.h"

namespace ehc {

EHC_HD uint32_t float_bits(float x) {
  uint32_t bits = 0;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
EHC_HD float float_from_bits(uint32_t bits) {
  float x = 0;
  memcpy(&x, &bits, sizeof x);
  return x;
}

EHC_HD float bf16_to_float(uint16_t bits) { return float_from_bits(uint32_t{bits} << 16); }

EHC_HD uint16_t float_to_bf16(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<uint16_t>(bits >> 16 | 0x40U);
  return static_cast<uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

EHC_HD float f16_to_float(uint16_t half) {
  const uint32_t sign = uint32_t{half} << 16 & 0x80000000U;
  const uint32_t magnitude_bits = half & 0x7fffU;
  if (magnitude_bits >= 0x7c00U) {
    return float_from_bits(sign | 0x7f800000U | (magnitude_bits & 0x3ffU) << 13);
  }
  if (magnitude_bits < 0x400U) {  // zero and subnormals: exact multiples of 2^-24
    return float_from_bits(sign | float_bits(static_cast<float>(magnitude_bits) * 0x1p-24F));
  }
  return float_from_bits(sign | ((magnitude_bits << 13) + (112U << 23)));
}

EHC_HD uint16_t float_to_f16(float x) {
  const uint32_t bits = float_bits(x);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000U);
  const uint32_t size = bits & 0x7fffffffU;
  if (size > 0x7f800000U) return static_cast<uint16_t>(sign | 0x7e00U | (size >> 13 & 0x3ffU));
  if (size >= 0x477ff000U) return static_cast<uint16_t>(sign | 0x7c00U);  // rounds to inf
  if (size < 0x38800000U) {  // subnormal: adding 0.5 leaves round(x / 2^-24) in the low bits
    return static_cast<uint16_t>(sign | (float_bits(float_from_bits(size) + 0.5F) - 0x3f000000U));
  }
  return static_cast<uint16_t>(sign | ((size - (112U << 23) + 0xfffU + (size >> 13 & 1U)) >> 13));
}

// The nearest TF32 number: ten fraction bits, the low 13 zero. NaN stays NaN, infinities stay.
EHC_HD float round_to_tf32(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return float_from_bits((bits & ~0x1fffU) | 0x400000U);
  return float_from_bits((bits + 0xfffU + (bits >> 13 & 1U)) & ~0x1fffU);
}

// e4m3fn: bias 7, no infinities, 0x7f and 0xff are NaN.
EHC_HD float e4m3_to_float(uint8_t bits) {
  const uint32_t sign = uint32_t{bits} << 24 & 0x80000000U;
  const uint32_t exponent = bits >> 3 & 0xfU;
  const uint32_t fraction = bits & 7U;
  if ((bits & 0x7fU) == 0x7fU) return float_from_bits(sign | 0x7fc00000U);
  if (exponent == 0) {
    return float_from_bits(sign | float_bits(static_cast<float>(fraction) * 0x1p-9F));
  }
  return float_from_bits(sign | (exponent + 120U) << 23 | fraction << 20);
}

// ue8m0: 2^(byte - 127), 255 is NaN; byte 0 is the subnormal 2^-127.
EHC_HD float e8m0_to_float(uint8_t bits) {
  if (bits == 255) return float_from_bits(0x7fc00000U);
  return float_from_bits(bits == 0 ? 0x00400000U : uint32_t{bits} << 23);
}

// Element `at` of floating-point storage, widened; exact.
EHC_HD float load_float(const void* data, DType type, int64_t at) {
  switch (type) {
    case DType::f32:
      return static_cast<const float*>(data)[at];
    case DType::bf16:
      return bf16_to_float(static_cast<const uint16_t*>(data)[at]);
    case DType::f16:
      return f16_to_float(static_cast<const uint16_t*>(data)[at]);
    case DType::f8_e4m3:
      return e4m3_to_float(static_cast<const uint8_t*>(data)[at]);
    case DType::f8_e8m0:
      return e8m0_to_float(static_cast<const uint8_t*>(data)[at]);
    default:
      return 0;
  }
}

// Rounds once and stores; `type` is f32, bf16 or f16.
EHC_HD void store_float(void* data, DType type, int64_t at, float x) {
  if (type == DType::f32) {
    static_cast<float*>(data)[at] = x;
  } else if (type == DType::bf16) {
    static_cast<uint16_t*>(data)[at] = float_to_bf16(x);
  } else {
    static_cast<uint16_t*>(data)[at] = float_to_f16(x);
  }
}

// A double that is to be rounded to `type` in one step: rounding to odd at fp32 first keeps the
// second rounding exact.
EHC_HD float round_to_odd(double x) {
  float nearest = static_cast<float>(x);
  const double error = x - static_cast<double>(nearest);
  if (error == 0 || error != error) return nearest;
  uint32_t bits = float_bits(nearest);
  const bool away = (error < 0) != (nearest < 0 || (nearest == 0 && x < 0));
  if (away) --bits;  // truncate towards zero
  return float_from_bits(bits | 1U);
}

EHC_HD void store_float(void* data, DType type, int64_t at, double x) {
  if (type == DType::f32) {
    static_cast<float*>(data)[at] = static_cast<float>(x);
  } else {
    store_float(data, type, at, round_to_odd(x));
  }
}

}  // namespace ehc
