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

// 2^(j/32)
alignas(64) [[maybe_unused]] inline constexpr float kPowersOf32nds[32] = {
    0x1p0f,        0x1.059b0ep0f, 0x1.0b5586p0f, 0x1.11301ep0f, 0x1.172b84p0f, 0x1.1d4874p0f,
    0x1.2387a6p0f, 0x1.29e9ep0f,  0x1.306fep0f,  0x1.371a74p0f, 0x1.3dea64p0f, 0x1.44e086p0f,
    0x1.4bfdaep0f, 0x1.5342b6p0f, 0x1.5ab07ep0f, 0x1.6247ecp0f, 0x1.6a09e6p0f, 0x1.71f75ep0f,
    0x1.7a1148p0f, 0x1.82589ap0f, 0x1.8ace54p0f, 0x1.93737cp0f, 0x1.9c4918p0f, 0x1.a5503cp0f,
    0x1.ae89fap0f, 0x1.b7f77p0f,  0x1.c199bep0f, 0x1.cb720ep0f, 0x1.d5818ep0f, 0x1.dfc974p0f,
    0x1.ea4afap0f, 0x1.f50766p0f};

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
