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
//   stream                  as store, past the caches; rows must start on a cache line (can_stream,
//                           rows_can_stream)
//   exp_nonpositive,        at most 2, 2 and 4 ulp, never overflow inside, NaN kept; no libm, so
//   sigmoid, add_silu       that a tail has the bits of a body filled up with zeros
//   sigmoid_slope           s (1 - s) for s = sigmoid, without cancellation
//   reduce_add              fixed tree
//   transpose               kLanes vectors of kLanes lanes
//   prefetch, prefetch_near into the second-level and the first-level cache
// `fma` rounds once everywhere, also where the processor has no such instruction.
#pragma once

#include <type_traits>

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
EHC_SIMD Pair lane_order(Pair x) {
  if constexpr (std::is_same_v<A, Bf16>) return to_bf16_order(x);
  return x;
}

template <class A>
EHC_SIMD Pair natural_order(Pair x) {
  if constexpr (std::is_same_v<A, Bf16>) return from_bf16_order(x);
  return x;
}

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

// Copies bits, not values, so that no NaN changes; past the caches when `streaming`, for which `to`
// must allow it.
EHC_SIMD void move_bits(void* to, const void* from, size_t bytes, bool streaming) {
  constexpr size_t kStep = kPair * sizeof(float);
  size_t done = 0;
  for (; streaming && done + kStep <= bytes; done += kStep) {
    stream(reinterpret_cast<float*>(static_cast<char*>(to) + done),
           load(reinterpret_cast<const float*>(static_cast<const char*>(from) + done)));
  }
  std::memcpy(static_cast<char*>(to) + done, static_cast<const char*>(from) + done, bytes - done);
}

// sum + x^2 over the first `count` elements at p, at most a pair of them.
template <class A>
EHC_SIMD Pair add_squares(Pair sum, const A* p, int64_t count) {
  if constexpr (kBf16Products && std::is_same_v<A, Bf16>) {
    const auto x = load_raw(p, count);
    return add_products(sum, x, x);
  } else {
    const Pair x = load_some(p, count);
    return fma(x, x, sum);
  }
}

// The sum of squares of a row whose pairs were added to `sum` by add_squares.
template <class A>
EHC_SIMD float square_sum(Pair sum, const A* row, int64_t hidden) {
  float squares = reduce_add(sum);
  // The product instruction takes subnormals for zero, which in a row of nothing larger shows.
  if (kBf16Products && std::is_same_v<A, Bf16> && squares < 0x1p-80f) [[unlikely]] {
    sum = zero_pair();
    for (int64_t i = 0; i < hidden; i += kPair) {
      const Pair x = load_some(row + i, hidden - i);
      sum = fma(x, x, sum);
    }
    squares = reduce_add(sum);
  }
  return squares;
}

// The same from the start.
template <class A>
EHC_SIMD float square_sum(const A* row, int64_t hidden) {
  Pair sum = zero_pair();
  for (int64_t i = 0; i < hidden; i += kPair) sum = add_squares(sum, row + i, hidden - i);
  return square_sum(sum, row, hidden);
}

// Whether all rows of a tensor of A start on a cache line.
template <class A>
EHC_SIMD bool rows_can_stream(const void* rows, int64_t token_stride, int64_t stream_stride) {
  return can_stream(rows) && token_stride * sizeof(A) % 64 == 0 &&
         stream_stride * sizeof(A) % 64 == 0;
}

// The value that a reader of the stored A sees.
template <class A>
EHC_SIMD Pair rounded_to(Pair x) {
  A row[kPair];
  store(row, x);
  return load(row);
}

// e^x for kCount x in [-104, 0], or with kBaseTwo 2^x for x in [-150, 0]: 2^k (1 + r q(r)) with k
// the exponent of 2 rounded to a multiple of 2^-kBits, whose fraction picks a power from a table;
// without bits there is none. Step by step for all of them: one alone is a chain of 60 cycles that
// leaves the units idle, and the processor looks ahead over too few instructions to fill them from
// the next.
template <int kBits, int kCount, bool kBaseTwo = false>
EHC_SIMD void exp_bounded(const Vec* x, Vec* power) {
  // Adding it rounds to such a multiple, which then sits in the low bits.
  const Vec shift = splat(12582912.0f / (1 << kBits));  // 1.5 * 2^(23 - kBits)
  Vec shifted[kCount], k[kCount], r[kCount], q[kCount];
#define EHC_EACH _Pragma("GCC unroll 16") for (int i = 0; i < kCount; ++i)
  if constexpr (kBaseTwo) {
    EHC_EACH shifted[i] = add(x[i], shift);
    EHC_EACH k[i] = sub(shifted[i], shift);
    EHC_EACH r[i] = mul(sub(x[i], k[i]), splat(0x1.62e43p-1f));
  } else {
    EHC_EACH shifted[i] = fma(x[i], splat(0x1.715476p+0f), shift);
    EHC_EACH k[i] = sub(shifted[i], shift);
    EHC_EACH r[i] = fma(k[i], splat(-0x1.628p-1f), x[i]);
    EHC_EACH r[i] = fma(k[i], splat(-0x1.90bfbep-11f), r[i]);
  }
  if constexpr (kBits == 3) {
    EHC_EACH q[i] = fma(splat(0x1.5560eep-3f), r[i], splat(0x1.00087ep-1f));
    EHC_EACH q[i] = fma(q[i], r[i], splat(1.0f));
  } else {
    EHC_EACH q[i] = fma(splat(0x1.6d10fcp-10f), r[i], splat(0x1.120b62p-7f));
    EHC_EACH q[i] = fma(q[i], r[i], splat(0x1.55551ap-5f));
    EHC_EACH q[i] = fma(q[i], r[i], splat(0x1.5554dep-3f));
    EHC_EACH q[i] = fma(q[i], r[i], splat(0.5f));
    EHC_EACH q[i] = fma(q[i], r[i], splat(1.0f));
  }
  if constexpr (kBits == 0) {
    EHC_EACH power[i] = fma(q[i], r[i], splat(1.0f));
  } else {
    EHC_EACH r[i] = mul(r[i], q[i]);
    EHC_EACH power[i] = power_of_fraction(shifted[i]);
    EHC_EACH power[i] = fma(power[i], r[i], power[i]);
  }
  EHC_EACH power[i] = scale_down<kBits>(power[i], k[i], shifted[i]);
}

// e^x for x <= 0.
EHC_SIMD Vec exp_nonpositive(Vec x) {
  const Vec bounded = max_keep_nan(splat(-104.0f), x);
  Vec power;
  exp_bounded<0, 1>(&bounded, &power);
  return power;
}

// 1 / (1 + e^-x), for negative x as e^x / (1 + e^x).
EHC_SIMD Vec sigmoid(Vec x) {
  const Vec e = exp_nonpositive(minus_magnitude(x));
  return div(select_negative(x, e, splat(1.0f)), add(splat(1.0f), e));
}

// s (1 - s) for s = sigmoid(x), as e / (1 + e)^2 with e = e^-|x|.
EHC_SIMD Vec sigmoid_slope(Vec x) {
  const Vec e = exp_nonpositive(minus_magnitude(x));
  const Vec sum = add(splat(1.0f), e);
  return div(e, mul(sum, sum));
}

// y + x * sigmoid(x) for kPairs pairs, rounded once; x * e^x / (1 + e^x) for negative x. Division
// is slow: one of the product of both denominators of a pair, which lie in [1, 2] also for NaN,
// serves the two.
template <int kPairs>
EHC_SIMD void add_silu(const Pair* x, Pair* y) {
  constexpr int kCount = 2 * kPairs;
  Vec numerator[kCount], denominator[kCount], e[kCount], q[kPairs];
  for (int i = 0; i < kPairs; ++i) numerator[2 * i] = x[i].a, numerator[2 * i + 1] = x[i].b;
  EHC_EACH denominator[i] = minus_magnitude(numerator[i], 104.0f);
  exp_bounded<kPowerBits, kCount>(denominator, e);
  EHC_EACH numerator[i] = scale_negative(numerator[i], e[i]);
  EHC_EACH denominator[i] = add(splat(1.0f), e[i]);
  for (int i = 0; i < kPairs; ++i) q[i] = mul(denominator[2 * i], denominator[2 * i + 1]);
  for (int i = 0; i < kPairs; ++i) q[i] = div(splat(1.0f), q[i]);
  for (int i = 0; i < kPairs; ++i) {
    y[i].a = fma(numerator[2 * i], mul(q[i], denominator[2 * i + 1]), y[i].a);
    y[i].b = fma(numerator[2 * i + 1], mul(q[i], denominator[2 * i]), y[i].b);
  }
}

// gradient * silu'(x) * log2(e) with x = t / log2(e), for kPairs pairs: whoever forms t can fold
// the factor into what it multiplies, and base 2 saves steps. silu'(x) = s (1 + x rest), s =
// sigmoid(x) and rest = 1 - s without cancellation.
template <int kPairs>
EHC_SIMD void silu_gradient(const Pair* t, const Pair* gradient, Pair* product) {
  constexpr int kCount = 2 * kPairs;
  const Vec one = splat(1.0f), log2e = splat(0x1.715476p+0f);
  Vec in[kCount], e[kCount], s[kCount], rest[kCount], out[kCount];
  for (int i = 0; i < kPairs; ++i) in[2 * i] = t[i].a, in[2 * i + 1] = t[i].b;
  for (int i = 0; i < kPairs; ++i) out[2 * i] = gradient[i].a, out[2 * i + 1] = gradient[i].b;
  if constexpr (kHasPowerParts) {
    // e = e^x may overflow: then rest is 0 and the NaN in s becomes 1.
    Vec floored[kCount], f[kCount], q[kCount];
    EHC_EACH floored[i] = floor_of_32nds(in[i]);
    EHC_EACH f[i] = fraction_of_32nds(in[i]);
    EHC_EACH q[i] = fma(splat(0x1.f0f3e6p-3f), f[i], splat(0x1.62e11ep-1f));
    EHC_EACH e[i] = power_of_32nds(floored[i]);
    EHC_EACH q[i] = mul(q[i], f[i]);
    EHC_EACH e[i] = fma(e[i], q[i], e[i]);
    EHC_EACH e[i] = scale_by_power(e[i], in[i]);
    EHC_EACH rest[i] = div(one, add(one, e[i]));
    EHC_EACH s[i] = min_or_second(mul(e[i], rest[i]), one);
  } else {
    // e = e^-|x|; one division serves a pair, as in add_silu.
    Vec denominator[kCount], large[kCount], small[kCount], q[kPairs];
    EHC_EACH denominator[i] = minus_magnitude(in[i], 150.0f);
    exp_bounded<kPowerBits, kCount, true>(denominator, e);
    EHC_EACH denominator[i] = add(one, e[i]);
    for (int i = 0; i < kPairs; ++i) q[i] = mul(denominator[2 * i], denominator[2 * i + 1]);
    for (int i = 0; i < kPairs; ++i) q[i] = div(one, q[i]);
    EHC_EACH large[i] = mul(q[i / 2], denominator[i ^ 1]);
    EHC_EACH small[i] = mul(e[i], large[i]);
    EHC_EACH rest[i] = select_negative(in[i], large[i], small[i]);
    EHC_EACH s[i] = select_negative(in[i], small[i], large[i]);
  }
  EHC_EACH rest[i] = fma(in[i], rest[i], log2e);
  EHC_EACH s[i] = mul(s[i], out[i]);
  EHC_EACH out[i] = mul(s[i], rest[i]);
  for (int i = 0; i < kPairs; ++i) product[i] = {out[2 * i], out[2 * i + 1]};
}
#undef EHC_EACH

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
