// Storage types of activations, and what their pairs of vectors look like.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef EHC_ISA
#define EHC_ISA generic
#endif

// Everything in the simd headers has internal linkage: nothing compiled for one instruction set may
// be shared with code for another.
#define EHC_SIMD [[gnu::always_inline]] inline
#define EHC_SIMD_LAMBDA __attribute__((always_inline))

namespace ehc::simd::EHC_ISA {
namespace {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

// 2^(j/8), twice
alignas(64) [[maybe_unused]] inline constexpr float kPowers[16] = {
    0x1p0f,        0x1.172b84p0f, 0x1.306fep0f,  0x1.4bfdaep0f, 0x1.6a09e6p0f, 0x1.8ace54p0f,
    0x1.ae89fap0f, 0x1.d5818ep0f, 0x1p0f,        0x1.172b84p0f, 0x1.306fep0f,  0x1.4bfdaep0f,
    0x1.6a09e6p0f, 0x1.8ace54p0f, 0x1.ae89fap0f, 0x1.d5818ep0f};

EHC_SIMD uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

EHC_SIMD float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

EHC_SIMD float widen(float x) { return x; }
EHC_SIMD float widen(Bf16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
// Without branches, so that loops over lanes become vector code.
EHC_SIMD float widen(F16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t size = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t finite = bits_of(float_of(size) * 0x1p112f);  // exact, also for subnormals
  const uint32_t quiet = size > 0x0f800000u ? 0x400000u : 0u;
  return float_of(sign | (size >= 0x0f800000u ? size | 0x7f800000u | quiet : finite));
}

}  // namespace
}  // namespace ehc::simd::EHC_ISA
