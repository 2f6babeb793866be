// Vectors of fp32 lanes for `<op>_cpu.cc`: one source, compiled once per instruction set.
//
//   Vec    kLanes floats: 16 (AVX-512), 8 (AVX2, generic)
//   Pair   two Vec that hold 2*kLanes consecutive elements of a row. Which element sits in which
//          lane is fixed by the element type A: natural for float and F16, split in groups of four
//          for Bf16 on x86, where unpacking then costs one instruction a vector. fp32 rows that
//          meet a Bf16 row are loaded in its order (load_f32<A>). Lanes depend on the column alone.
//
//   load, load_tail         A -> fp32; a tail reads `count` elements and fills up with +0
//   store, store_tail       fp32 -> A, to nearest even, NaN kept, subnormals kept
//   stream                  as store, past the caches; rows must start on a cache line (can_stream)
//   exp, sigmoid, silu      at most 2 ulp, never overflow inside, NaN kept; no libm, so that a lane
//                           of a tail has the bits of a lane of the body
//   reduce_add              fixed tree
// `fma` rounds once everywhere, also where the processor has no such instruction.
#pragma once

#include "backends/cpu/simd_types.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "backends/cpu/simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "backends/cpu/simd_avx2.h"
#else
#include "backends/cpu/simd_generic.h"
#endif

namespace ehc::simd::EHC_ISA {
namespace {

// Elements of a row that one Pair holds.
inline constexpr int kPair = 2 * kLanes;

EHC_SIMD Pair zero_pair() { return {zero(), zero()}; }
EHC_SIMD Pair add(Pair x, Pair y) { return {add(x.a, y.a), add(x.b, y.b)}; }
EHC_SIMD Pair mul(Pair x, Pair y) { return {mul(x.a, y.a), mul(x.b, y.b)}; }
EHC_SIMD Pair mul(Pair x, Vec y) { return {mul(x.a, y), mul(x.b, y)}; }
EHC_SIMD Pair fma(Pair x, Pair y, Pair z) { return {fma(x.a, y.a, z.a), fma(x.b, y.b, z.b)}; }
EHC_SIMD Pair fma(Vec x, Pair y, Pair z) { return {fma(x, y.a, z.a), fma(x, y.b, z.b)}; }
EHC_SIMD float reduce_add(Pair x) { return reduce_add(add(x.a, x.b)); }

// A whole pair or, when count < kPair, its first `count` elements.
template <class A>
EHC_SIMD Pair load_some(const A* p, int64_t count) {
  return count >= kPair ? load(p) : load_tail(p, static_cast<int>(count));
}

template <class A>
EHC_SIMD Pair load_f32_some(const float* p, int64_t count) {
  return count >= kPair ? load_f32<A>(p) : load_f32_tail<A>(p, static_cast<int>(count));
}

template <class A>
EHC_SIMD void store_some(A* p, Pair x, int64_t count, bool streaming) {
  if (count < kPair) {
    store_tail(p, x, static_cast<int>(count));
  } else if (streaming) {
    stream(p, x);
  } else {
    store(p, x);
  }
}

// Streaming stores want rows that start on a cache line.
EHC_SIMD bool can_stream(const void* row) { return reinterpret_cast<uintptr_t>(row) % 64 == 0; }

// e^x for x <= 0; NaN stays NaN. x = k ln2 + r; e^r = 1 + r + r^2 q(r) with q of degree 4.
EHC_SIMD Vec exp_bounded(Vec x) {
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = fma(x, splat(0x1.715476p+0f), shift);
  const Vec k = sub(shifted, shift);
  Vec r = fma(k, splat(-0x1.628p-1f), x);
  r = fma(k, splat(-0x1.90bfbep-11f), r);
  Vec p = fma(splat(0x1.6d10fcp-10f), r, splat(0x1.120b62p-7f));
  p = fma(p, r, splat(0x1.55551ap-5f));
  p = fma(p, r, splat(0x1.5554dep-3f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return scale_by_power(p, k, shifted);
}

EHC_SIMD Vec exp(Vec x) {
  return exp_bounded(min_keep_nan(splat(89.0f), max_keep_nan(splat(-104.0f), x)));
}

// e^-|x|: the only exponential that the logistic function needs.
EHC_SIMD Vec exp_minus_magnitude(Vec x) {
  return exp_bounded(max_keep_nan(splat(-104.0f), minus_magnitude(x)));
}

// 1 / (1 + e^-x), for negative x as e^x / (1 + e^x).
EHC_SIMD Vec sigmoid(Vec x) {
  const Vec e = exp_minus_magnitude(x);
  return div(select_negative(x, e, splat(1.0f)), add(splat(1.0f), e));
}

// x * sigmoid(x)
EHC_SIMD Vec silu(Vec x) {
  const Vec e = exp_minus_magnitude(x);
  return div(select_negative(x, mul(x, e), x), add(splat(1.0f), e));
}

EHC_SIMD Pair silu(Pair x) { return {silu(x.a), silu(x.b)}; }

// One value, with the bits that a lane would have.
EHC_SIMD float sigmoid(float x) { return first_lane(sigmoid(splat(x))); }

}  // namespace
}  // namespace ehc::simd::EHC_ISA
