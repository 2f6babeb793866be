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

namespace ehc::simd::EHC_ISA {
namespace {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

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

}  // namespace
}  // namespace ehc::simd::EHC_ISA
