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
//   exp_nonpositive,        at most 2, 2 and 3 ulp, never overflow inside, NaN kept; no libm, so
//   sigmoid, silu           that a lane of a tail has the bits of a lane of the body
//   reduce_add              fixed tree
// `fma` rounds once everywhere, also where the processor has no such instruction.
#pragma once

#include "backends/cpu/simd_types.h"
#include "ehc/dtype.h"

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

// fp32 rows in the order of lanes that rows of A have. lane_order<A> goes there, natural_order<A>
// back.
template <class A>
EHC_SIMD Pair load_f32(const float* p) {
  return lane_order<A>(load(p));
}

template <class A>
EHC_SIMD Pair load_f32_tail(const float* p, int count) {
  return lane_order<A>(load_tail(p, count));
}

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

// The value that a reader of the stored A sees.
template <class A>
EHC_SIMD Pair rounded_to(Pair x) {
  A row[kPair];
  store(row, x);
  return load(row);
}

// e^x for kCount x in [-104, 0], NaN stays NaN. x = k ln2 + r; e^r = 1 + r + r^2 q(r), q of
// degree 4. Step by step for all of them: one alone is a chain of 60 cycles that leaves the units
// idle, and the processor looks ahead over too few instructions to fill them from the next.
template <int kCount>
EHC_SIMD void exp_bounded(const Vec* x, Vec* power) {
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Vec k[kCount], r[kCount];
#define EHC_EACH _Pragma("GCC unroll 16") for (int i = 0; i < kCount; ++i)
  EHC_EACH k[i] = sub(fma(x[i], splat(0x1.715476p+0f), shift), shift);
  EHC_EACH r[i] = fma(k[i], splat(-0x1.628p-1f), x[i]);
  EHC_EACH r[i] = fma(k[i], splat(-0x1.90bfbep-11f), r[i]);
  EHC_EACH power[i] = fma(splat(0x1.6d10fcp-10f), r[i], splat(0x1.120b62p-7f));
  EHC_EACH power[i] = fma(power[i], r[i], splat(0x1.55551ap-5f));
  EHC_EACH power[i] = fma(power[i], r[i], splat(0x1.5554dep-3f));
  EHC_EACH power[i] = fma(power[i], r[i], splat(0.5f));
  EHC_EACH power[i] = fma(power[i], r[i], splat(1.0f));
  EHC_EACH power[i] = fma(power[i], r[i], splat(1.0f));
  EHC_EACH power[i] = scale_down(power[i], k[i], add(k[i], shift));
}

EHC_SIMD Vec exp_bounded(Vec x) {
  Vec power;
  exp_bounded<1>(&x, &power);
  return power;
}

// e^x for x <= 0.
EHC_SIMD Vec exp_nonpositive(Vec x) { return exp_bounded(max_keep_nan(splat(-104.0f), x)); }

// 1 / (1 + e^-x), for negative x as e^x / (1 + e^x).
EHC_SIMD Vec sigmoid(Vec x) {
  const Vec e = exp_nonpositive(minus_magnitude(x));
  return div(select_negative(x, e, splat(1.0f)), add(splat(1.0f), e));
}

// x * sigmoid(x) as a fraction over 1 + e^-|x|, for kCount of them: numerators in place of x.
// Division is slow but has its own unit: put other work between this and the quotient.
template <int kCount>
EHC_SIMD void silu_fraction(Vec* x, Vec* denominator) {
  Vec bounded[kCount];
  EHC_EACH bounded[i] = minus_magnitude(x[i], 104.0f);
  exp_bounded<kCount>(bounded, denominator);
  EHC_EACH x[i] = scale_negative(x[i], denominator[i]);
  EHC_EACH denominator[i] = add(splat(1.0f), denominator[i]);
}
#undef EHC_EACH

EHC_SIMD Vec silu(Vec x) {
  Vec denominator;
  silu_fraction<1>(&x, &denominator);
  return div(x, denominator);
}
EHC_SIMD Pair silu(Pair x) { return {silu(x.a), silu(x.b)}; }

template <int kPairs>
EHC_SIMD void silu_fraction(Pair* x, Pair* denominator) {
  Vec n[2 * kPairs], d[2 * kPairs];
  for (int i = 0; i < kPairs; ++i) n[2 * i] = x[i].a, n[2 * i + 1] = x[i].b;
  silu_fraction<2 * kPairs>(n, d);
  for (int i = 0; i < kPairs; ++i) {
    x[i] = {n[2 * i], n[2 * i + 1]};
    denominator[i] = {d[2 * i], d[2 * i + 1]};
  }
}
EHC_SIMD Pair div(Pair x, Pair y) { return {div(x.a, y.a), div(x.b, y.b)}; }

// One value, with the bits that a lane would have.
EHC_SIMD float sigmoid(float x) { return first_lane(sigmoid(splat(x))); }

// Calls body with a value of the storage type of an activation.
template <class Body>
inline void with_activation(DType activation, const Body& body) {
  if (activation == DType::bf16) {
    body(Bf16{});
  } else if (activation == DType::f16) {
    body(F16{});
  } else {
    body(float{});
  }
}

}  // namespace
}  // namespace ehc::simd::EHC_ISA
