// What leads from the sums of a projection to the coefficients of a token, step by step, for the
// operators of a step and for the one that fuses them: same functions, same bits.
#pragma once

#include "ops/mhc/reduce_partials/reduce_partials_args.h"
#include "ops/mhc/shared/pairwise_sum.h"
#include "ops/mhc/shared/stream_rows.cuh"
#include "ops/mhc/sinkhorn/sinkhorn_math.h"
#include "ops/mhc/split/split_args.h"
#include "ops/mhc/split/split_math.h"

namespace ehc::mhc {

// --- 2.4, sums over splits ---

__device__ __forceinline__ float* element_of(const GroupRows& rows, int64_t token, int64_t group,
                                             int64_t j) {
  return rows.data + token * rows.token_stride + group * rows.group_stride + j;
}

// pairwise_sum of a power of two.
template <int kCount, class Load>
__device__ __forceinline__ float balanced_sum(const Load& load) {
  float sum[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] = load(i);
#pragma unroll
  for (int width = 1; width < kCount; width *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2 * width) sum[i] += sum[i + width];
  }
  return sum[0];
}

// Splits that are on their way at once. A subtree of pairwise_sum has as many leaves.
inline constexpr int kSplitsTogether = 16;

// pairwise_sum of so many values at most, a stride apart.
__device__ __forceinline__ float subtree_sum(const float* from, int64_t stride, int64_t count) {
  float sum[kSplitsTogether];
#pragma unroll
  for (int i = 0; i < kSplitsTogether; ++i) sum[i] = i < count ? __ldg(from + i * stride) : 0.0f;
#pragma unroll
  for (int width = 1; width < kSplitsTogether; width *= 2) {
#pragma unroll
    for (int i = 0; i < kSplitsTogether; i += 2 * width) {
      if (i + width < count) sum[i] += sum[i + width];
    }
  }
  return sum[0];
}

// pairwise_sum of any number. A function of its own, to be compiled once.
inline __device__ __noinline__ float sum_of_many(const float* from, int64_t stride, int64_t count) {
  return pairwise_sum((count + kSplitsTogether - 1) / kSplitsTogether, 0.0f, [&](int64_t s) {
    const int64_t first = s * kSplitsTogether;
    return subtree_sum(from + first * stride, stride, count - first);
  });
}

// Adds splits in the tree of pairwise_sum. kOne: there is one.
template <bool kOne>
__device__ __forceinline__ float sum_of_splits(const GroupRows& partial, int64_t splits, int64_t t,
                                               int64_t g, int64_t j) {
  const float* first = element_of(partial, t, g, j);
  if constexpr (kOne) return __ldg(first);
  return sum_of_many(first, partial.split_stride, splits);
}

// Mixes of a token by their numbers; `keep(g, sqr, mul)` takes the sums of a group. All loads come
// before the factor, which branches.
template <bool kOne, int kCount, class Keep>
__device__ __forceinline__ void reduce_some(const ReducePartialsForwardArgs& a, int64_t t,
                                            const int64_t (&numbers)[kCount],
                                            float (&mixed)[kCount], const Keep& keep) {
#pragma unroll
  for (float& x : mixed) x = 0;
#pragma unroll 1
  for (int64_t g = 0; g < a.groups; ++g) {
    float mul[kCount];
    const float sqr = sum_of_splits<kOne>(a.sqr_partial, a.splits, t, g, 0);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      mul[k] = sum_of_splits<kOne>(a.mul_partial, a.splits, t, g, numbers[k]);
    }
    keep(g, sqr, mul);
    const float factor = rms_factor(a.rms, sqr);
#pragma unroll
    for (int k = 0; k < kCount; ++k) mixed[k] = fmaf(mul[k], factor, mixed[k]);
  }
}
struct KeepNothing {
  __device__ __forceinline__ void operator()(int64_t, float, const float*) const {}
};

// Mixes [first, first + count) of a token.
template <bool kOne>
__device__ __forceinline__ void reduce_mixes(const ReducePartialsForwardArgs& a, int64_t t,
                                             int64_t first, int count, float* mixed) {
  for (int j = 0; j < count; ++j) mixed[j] = 0;
#pragma unroll 1
  for (int64_t g = 0; g < a.groups; ++g) {
    const float factor = rms_factor(a.rms, sum_of_splits<kOne>(a.sqr_partial, a.splits, t, g, 0));
#pragma unroll 4
    for (int j = 0; j < count; ++j) {
      const float mul = sum_of_splits<kOne>(a.mul_partial, a.splits, t, g, first + j);
      mixed[j] = fmaf(mul, factor, mixed[j]);
    }
  }
}

// --- 2.6, what mixes mean ---

// What makes the logit of a mix, so that it is on its way before the mix is known.
struct LogitTerms {
  float scale, base;

  __device__ __forceinline__ LogitTerms(const SplitForwardArgs& a, int64_t segment, int64_t j)
      : scale(__ldg(a.scale + segment)), base(__ldg(a.base + j)) {}
  __device__ __forceinline__ float logit(float mix) const { return mix_logit(mix, scale, base); }
};

__device__ __forceinline__ float split_pre(const SplitForwardArgs& a, float logit) {
  return mix_gate(logit, 1.0f, a.pre_eps);
}
__device__ __forceinline__ float split_post(const SplitForwardArgs& a, float logit) {
  return mix_gate(logit, a.post_mult, 0.0f);
}

// --- 2.7, division in the Sinkhorn iteration ---

// The same quotients from one reciprocal for all that share a divisor: the operations of the
// compiler's division, which are right as long as remainders are exact: x and x/d must be far above
// the least normal number.
struct SharedDivision {
  __device__ __forceinline__ auto operator()(float divisor) const {
    float near = 0;  // within one unit in the last place
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(divisor));
    const float reciprocal = fmaf(near, fmaf(-divisor, near, 1.0f), near);
    return [divisor, reciprocal](float x) {
      const float quotient = x * reciprocal;
      return fmaf(reciprocal, fmaf(-divisor, quotient, x), quotient);
    };
  }
};

// Two rounds at a time by SharedDivision where it is right: in a round a value shrinks at most to a
// 17th twice, for sums are at most 2n and eps at most 1. NaN does not matter, it becomes NaN either
// way.
template <int kStreams>
struct SharedRounds {
  static constexpr int64_t kTogether = 2;
  const SinkhornRule& rule;

  // With the least element of the matrix.
  __device__ __forceinline__ bool can_share(float least) const {
    constexpr float kLeast = 0x1p-60f;
    return least >= kLeast && (rule.eps == 0 || rule.eps >= kLeast) && rule.eps <= 1.0f;
  }
  __device__ __forceinline__ float least_of(const float* y) const {
    float least = y[0];
    const int n = count_of<kStreams>(rule.streams);
#pragma unroll
    for (int e = 1; e < n * n; ++e) least = fminf(least, y[e]);
    return least;
  }
  __device__ __forceinline__ void operator()(float* y, float* divisors) const {
    const int64_t rounds = whole_rounds(rule);
    for (int64_t first = 0; first < rounds; first += kTogether) {
      const int64_t last = min(rounds, first + kTogether);
      if (can_share(least_of(y))) {
        sinkhorn_some_rounds<kStreams>(rule, SharedDivision{}, first, last, y, divisors);
      } else {
        sinkhorn_some_rounds<kStreams>(rule, ScalarDivision<float>{}, first, last, y, divisors);
      }
    }
  }
};

// --- matrices of a token in registers ---

template <int kStreams>
inline constexpr int kMatrixRoom = kRoom<kStreams>* kRoom<kStreams>;

// [i,o] at i*n + o.
template <int kStreams>
__device__ __forceinline__ void load_matrix(const Coefficients& from, int64_t token,
                                            int64_t streams, float (&to)[kMatrixRoom<kStreams>]) {
  const int n = count_of<kStreams>(streams);
  const float* first = from.data + token * from.token_stride;
#pragma unroll
  for (int i = 0; i < n; ++i) load_line<kStreams>(first + i * from.row_stride, n, to + i * n);
}

template <int kStreams>
__device__ __forceinline__ void store_matrix(const float (&from)[kMatrixRoom<kStreams>],
                                             int64_t token, int64_t streams,
                                             const Coefficients& to) {
  const int n = count_of<kStreams>(streams);
  float* first = to.data + token * to.token_stride;
#pragma unroll
  for (int i = 0; i < n; ++i) {
#pragma unroll
    for (int o = 0; o < n; ++o) first[i * to.row_stride + o] = from[i * n + o];
  }
}

}  // namespace ehc::mhc
