// simd.h in plain loops, for processors without a header of their own.
#pragma once

#include "backends/cpu/simd_types.h"

namespace ehc::simd::EHC_ISA {
namespace {

inline constexpr int kLanes = 8;
// Pairs worth taking through a long computation step by step together.
inline constexpr int kPairsTogether = 1;
// Whether there are load_raw and add_products: bf16 products summed in fp32 by one instruction.
inline constexpr bool kBf16Products = false;
// Loops over lanes that are long code: inlined everywhere they take a minute to compile.
#define EHC_SIMD_CALL [[gnu::noinline, maybe_unused]]

struct Vec {
  float lane[kLanes];
};
struct Pair {
  Vec a, b;
};

template <class F>
EHC_SIMD Vec each_lane(F&& f) {
  Vec result;
  for (int i = 0; i < kLanes; ++i) result.lane[i] = f(i);
  return result;
}

// a * b + c with one rounding. Without the instruction the product is exact in double and the sum
// is rounded to odd there, after which rounding to float is right (53 >= 2 * 24 + 2 bits).
EHC_SIMD float fma_once(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  const double product = static_cast<double>(a) * b;
  double sum = product + c;
  const double back = sum - product;
  const double error = (product - (sum - back)) + (c - back);
  if (error > 0 || error < 0) {
    int64_t bits;
    std::memcpy(&bits, &sum, sizeof bits);
    if (bits % 2 == 0) bits += (error > 0) == (sum > 0) ? 1 : -1;
    std::memcpy(&sum, &bits, sizeof bits);
  }
  return static_cast<float>(sum);
#endif
}

EHC_SIMD Vec splat(float x) {
  return each_lane([&](int) { return x; });
}
EHC_SIMD Vec zero() { return splat(0.0f); }
EHC_SIMD float first_lane(Vec x) { return x.lane[0]; }
EHC_SIMD Vec add(Vec x, Vec y) {
  return each_lane([&](int i) { return x.lane[i] + y.lane[i]; });
}
EHC_SIMD Vec sub(Vec x, Vec y) {
  return each_lane([&](int i) { return x.lane[i] - y.lane[i]; });
}
EHC_SIMD Vec mul(Vec x, Vec y) {
  return each_lane([&](int i) { return x.lane[i] * y.lane[i]; });
}
EHC_SIMD Vec div(Vec x, Vec y) {
  return each_lane([&](int i) { return x.lane[i] / y.lane[i]; });
}
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
EHC_SIMD
#else
EHC_SIMD_CALL
#endif
Vec fma(Vec x, Vec y, Vec z) {
  return each_lane([&](int i) { return fma_once(x.lane[i], y.lane[i], z.lane[i]); });
}
EHC_SIMD Vec minus_magnitude(Vec x) {
  return each_lane([&](int i) { return float_of(bits_of(x.lane[i]) | 0x80000000u); });
}
EHC_SIMD Vec max_keep_nan(Vec bound, Vec x) {
  return each_lane([&](int i) { return bound.lane[i] > x.lane[i] ? bound.lane[i] : x.lane[i]; });
}
// -min(|x|, bound); -bound for NaN.
EHC_SIMD Vec minus_magnitude(Vec x, float bound) {
  const Vec negative = minus_magnitude(x);
  return each_lane([&](int i) { return negative.lane[i] > -bound ? negative.lane[i] : -bound; });
}
// Lanes of `x` with the sign bit set take `negative`.
EHC_SIMD Vec select_negative(Vec x, Vec negative, Vec positive) {
  return each_lane(
      [&](int i) { return bits_of(x.lane[i]) >> 31 ? negative.lane[i] : positive.lane[i]; });
}
// x * factor in lanes with the sign bit of x set.
EHC_SIMD Vec scale_negative(Vec x, Vec factor) { return select_negative(x, mul(x, factor), x); }

inline constexpr int kPowerBits = 0;  // no table
inline constexpr bool kHasPowerParts = false;

// x * 2^k for k in -151 .. 0, by way of 2^(k + 64), so that a subnormal result is rounded once.
// `shifted` holds the integer k in its low bits; those above leave at the top.
template <int kBits>
EHC_SIMD Vec scale_down(Vec x, Vec, Vec shifted) {
  return each_lane([&](int i) {
    return x.lane[i] * float_of((bits_of(shifted.lane[i]) + (127u + 64u)) << 23) * 0x1p-64f;
  });
}

EHC_SIMD float reduce_add(Vec x) {
  static_assert(kLanes == 8);
  float sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = x.lane[i] + x.lane[i + 4];
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// Lane i of vector j becomes lane j of vector i.
EHC_SIMD void transpose(Vec* x) {
  for (int i = 0; i < kLanes; ++i) {
    for (int k = 0; k < i; ++k) {
      const float swapped = x[i].lane[k];
      x[i].lane[k] = x[k].lane[i];
      x[k].lane[i] = swapped;
    }
  }
}

EHC_SIMD void prefetch(const void* p) { __builtin_prefetch(p); }
EHC_SIMD void prefetch_near(const void* p) { __builtin_prefetch(p); }
EHC_SIMD void stream_fence() {}

// --- one element ---

EHC_SIMD void narrow(float x, float* p) { *p = x; }

EHC_SIMD void narrow(float x, Bf16* p) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = x != x ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u);
  p->bits = static_cast<uint16_t>(rounded >> 16);
}

EHC_SIMD void narrow(float x, F16* p) {
  const uint32_t sign = bits_of(x) >> 31, size = bits_of(x) & 0x7fffffffu;
  // Below 2^-14 adding 0.5 rounds to a multiple of 2^-24.
  const uint32_t small = bits_of(float_of(size) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (size + 0xfffu + (size >> 13 & 1u) - 0x38000000u) >> 13;
  const uint32_t nan = 0x7e00u | (size >> 13 & 1023u);
  uint32_t half = size < 0x38800000u ? small : normal;
  half = size >= 0x477ff000u ? 0x7c00u : half;  // rounds to 65536 or beyond
  half = size > 0x7f800000u ? nan : half;
  p->bits = static_cast<uint16_t>(sign << 15 | half);
}

// --- rows; every type in natural order ---

template <class A>
EHC_SIMD_CALL Pair load(const A* p) {
  return {each_lane([&](int i) { return widen(p[i]); }),
          each_lane([&](int i) { return widen(p[kLanes + i]); })};
}

template <class A>
EHC_SIMD_CALL Pair load_tail(const A* p, int count) {
  return {each_lane([&](int i) { return i < count ? widen(p[i]) : 0.0f; }),
          each_lane([&](int i) { return kLanes + i < count ? widen(p[kLanes + i]) : 0.0f; })};
}

template <class A>
EHC_SIMD_CALL void store_tail(A* p, Pair x, int count) {
  for (int i = 0; i < count; ++i) narrow(i < kLanes ? x.a.lane[i] : x.b.lane[i - kLanes], p + i);
}

template <class A>
EHC_SIMD_CALL void store(A* p, Pair x) {
  for (int i = 0; i < kLanes; ++i) narrow(x.a.lane[i], p + i);
  for (int i = 0; i < kLanes; ++i) narrow(x.b.lane[i], p + kLanes + i);
}

template <class A>
EHC_SIMD void stream(A* p, Pair x) {
  store(p, x);
}
EHC_SIMD bool can_stream(const void*) { return false; }

EHC_SIMD Pair to_bf16_order(Pair x) { return x; }
EHC_SIMD Pair from_bf16_order(Pair x) { return x; }

}  // namespace
}  // namespace ehc::simd::EHC_ISA
