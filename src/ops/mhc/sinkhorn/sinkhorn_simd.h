// What the Sinkhorn kernels need beyond the mathematics: division that is fast and exact, and the
// logarithm of a sum.
#pragma once

#include "ops/mhc/shared/token_lanes_simd.h"
#include "ops/mhc/sinkhorn/sinkhorn_math.h"

namespace ehc::mhc::EHC_ISA {
namespace {

struct TrueDivision {
  EHC_SIMD auto operator()(Lanes divisor) const {
    return [divisor](Lanes x) EHC_SIMD_LAMBDA { return div(x, divisor); };
  }
};

// The same quotients from one division for all that share a divisor. With r = 1/d correctly rounded
// the first remainder brings x r next to x/d, the second one rounds it right (Markstein), as long
// as remainders are exact: x and x/d must be far above the least normal number.
struct SharedDivision {
  EHC_SIMD auto operator()(Lanes divisor) const {
    const Lanes minus = sub(lanes(0.0f), divisor);
    const Lanes reciprocal = div(lanes(1.0f), divisor);
    return [minus, reciprocal](Lanes x) EHC_SIMD_LAMBDA {
      Lanes quotient = mul(x, reciprocal);
      quotient = fma(fma(minus, quotient, x), reciprocal, quotient);
      return fma(fma(minus, quotient, x), reciprocal, quotient);
    };
  }
};

// Rounds between two looks at whether SharedDivision is right. In each of them a value shrinks at
// most to a 17th twice: sums are at most 2n, eps at most 1.
inline constexpr int64_t kRoundsTogether = 2;
inline constexpr float kLeastShared = 0x1p-60f;

// May the next rounds use SharedDivision? All of y must be large enough, and so must eps, for it is
// a divisor. NaN does not matter: it becomes NaN either way.
template <int kStreams>
EHC_SIMD bool can_share(const SinkhornRule& rule, const Lanes* y) {
#if !defined(__FMA__)
  static_cast<void>(rule), static_cast<void>(y);
  return false;  // a remainder would be slower than a division
#else
  const int64_t n = kStreams == 0 ? rule.streams : kStreams;
  if (rule.eps > 1.0f || (rule.eps > 0.0f && rule.eps < kLeastShared)) return false;
  simd::Vec least = simd::splat(1.0f);
  for (int64_t e = 0; e < n * n; ++e) least = simd::min_or_second(y[e].v, least);
  return simd::all_at_least(least, kLeastShared);
#endif
}

template <int kStreams>
EHC_SIMD void sinkhorn_rounds(const SinkhornRule& rule, const SinkhornConstants<Lanes>& constants,
                              Lanes* y, Lanes* divisors) {
  const int64_t rounds = whole_rounds(rule);
  for (int64_t first = 0; first < rounds; first += kRoundsTogether) {
    const int64_t last = first + kRoundsTogether < rounds ? first + kRoundsTogether : rounds;
    const auto run = [&](const auto& division) EHC_SIMD_LAMBDA {
      for (int64_t round = first; round < last; ++round) {
        sinkhorn_round<kStreams>(rule, constants, division, y, divisors);
        if (divisors) divisors += 2 * rule.streams;
      }
    };
    if (can_share<kStreams>(rule, y)) {
      run(SharedDivision{});
    } else {
      run(TrueDivision{});
    }
  }
}

// log(x) for x in 1 .. 8: x over a power of two near it, then log((1 + z) / (1 - z)).
EHC_SIMD Lanes log_of_sum(Lanes x) {
  constexpr float kLog2 = 0x1.62e430p-1f;
  Lanes power = lanes(0.0f);
  Lanes below = sub(x, lanes(0x1.6a09e6p+1f));  // 2 sqrt 2
  x = select_negative(below, x, mul(x, lanes(0.25f)));
  power = select_negative(below, power, lanes(2 * kLog2));
  below = sub(x, lanes(0x1.6a09e6p+0f));
  x = select_negative(below, x, mul(x, lanes(0.5f)));
  power = select_negative(below, power, add(power, lanes(kLog2)));
  const Lanes z = div(sub(x, lanes(1.0f)), add(x, lanes(1.0f)));
  const Lanes square = mul(z, z);
  Lanes series = fma(square, lanes(2.0f / 9), lanes(2.0f / 7));
  series = fma(square, series, lanes(2.0f / 5));
  series = fma(square, series, lanes(2.0f / 3));
  series = mul(mul(square, series), z);
  return add(power, fma(lanes(2.0f), z, series));
}

}  // namespace
}  // namespace ehc::mhc::EHC_ISA
