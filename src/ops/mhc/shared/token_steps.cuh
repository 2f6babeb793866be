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

// Adds splits in the tree of pairwise_sum. kSplits: how many there are, so that all are on their
// way at once, or 0 for any number.
template <int kSplits>
__device__ __forceinline__ float sum_of_splits(const GroupRows& partial, int64_t splits, int64_t t,
                                               int64_t g, int64_t j) {
  const float* first = element_of(partial, t, g, j);
  const int64_t stride = partial.split_stride;
  if constexpr (kSplits == 0) {
    return pairwise_sum(splits, 0.0f, [&](int64_t s) { return __ldg(first + s * stride); });
  } else {
    return balanced_sum<kSplits>([&](int64_t s) { return __ldg(first + s * stride); });
  }
}

template <int kSplits>
__device__ __forceinline__ void reduce_mixes_of(const ReducePartialsForwardArgs& a, int64_t t,
                                                int64_t first, int count, float* mixed) {
#pragma unroll
  for (int j = 0; j < count; ++j) mixed[j] = 0;
  for (int64_t g = 0; g < a.groups; ++g) {
    const float sqr = sum_of_splits<kSplits>(a.sqr_partial, a.splits, t, g, 0);
    const float factor = rms_factor(a.rms, sqr);
    if (a.sqr.data != nullptr && first == 0) *element_of(a.sqr, t, g, 0) = sqr;
#pragma unroll
    for (int j = 0; j < count; ++j) {
      const float mul = sum_of_splits<kSplits>(a.mul_partial, a.splits, t, g, first + j);
      if (a.mul.data != nullptr) *element_of(a.mul, t, g, first + j) = mul;
      mixed[j] = fmaf(mul, factor, mixed[j]);
    }
  }
}

// Mixes [first, first + count) of a token, `count` known to the compiler if it can be.
__device__ __forceinline__ void reduce_mixes(const ReducePartialsForwardArgs& a, int64_t t,
                                             int64_t first, int count, float* mixed) {
  if (a.splits == 1) return reduce_mixes_of<1>(a, t, first, count, mixed);
  reduce_mixes_of<0>(a, t, first, count, mixed);
}

// --- 2.6, what mixes mean ---

__device__ __forceinline__ float split_logit(const SplitForwardArgs& a, int64_t segment, int64_t j,
                                             float mix) {
  return mix_logit(mix, a.scale[segment], a.base[j]);
}
__device__ __forceinline__ float split_pre(const SplitForwardArgs& a, int64_t i, float mix) {
  return mix_gate(split_logit(a, 0, i, mix), 1.0f, a.pre_eps);
}
__device__ __forceinline__ float split_post(const SplitForwardArgs& a, int64_t i, float mix) {
  return mix_gate(split_logit(a, 1, a.streams + i, mix), a.post_mult, 0.0f);
}
__device__ __forceinline__ float split_comb(const SplitForwardArgs& a, int64_t e, float mix) {
  return split_logit(a, 2, 2 * a.streams + e, mix);
}

// --- 2.7, division in the Sinkhorn iteration ---

// The same quotients from one reciprocal for all that share a divisor. As it is correctly rounded,
// the first remainder brings x r next to x/d, the second one rounds it right (Markstein), as long
// as remainders are exact: x and x/d must be far above the least normal number.
struct SharedDivision {
  __device__ __forceinline__ auto operator()(float divisor) const {
    const float reciprocal = __frcp_rn(divisor);
    return [divisor, reciprocal](float x) {
      float quotient = x * reciprocal;
      quotient = fmaf(fmaf(-divisor, quotient, x), reciprocal, quotient);
      return fmaf(fmaf(-divisor, quotient, x), reciprocal, quotient);
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

// --- 2.7 for four streams: a line of the matrix per lane, four neighbouring lanes a token ---

inline constexpr int kQuad = 4;

// The sums over a token's four lanes need no others of the warp.
__device__ __forceinline__ unsigned quad_mask(int lane) { return 0xfU << (lane / kQuad * kQuad); }

// Row r of a matrix is in lane r of the four; afterwards its column r is.
__device__ __forceinline__ void transpose_quad(int lane, float (&line)[kQuad]) {
  const auto swap = [&](int distance, int low, int high) {
    const bool upper = (lane & distance) != 0;
    const float sent = upper ? line[low] : line[high];
    const float got = __shfl_xor_sync(quad_mask(lane), sent, distance);
    line[low] = upper ? got : line[low];
    line[high] = upper ? line[high] : got;
  };
  swap(1, 0, 1);
  swap(1, 2, 3);
  swap(2, 0, 2);
  swap(2, 1, 3);
}

// comb of logits, of both the lane's row; not on logarithms. The operations of sinkhorn_matrix.
__device__ __forceinline__ void sinkhorn_quad(const SinkhornRule& rule, int lane,
                                              const float (&logits)[kQuad], float (&y)[kQuad]) {
  const SinkhornConstants<float> constants = sinkhorn_constants<float>(rule);
  const auto half_step = [&](const auto& division) {
    transpose_quad(lane, y);
    sinkhorn_line<true, float>(rule, constants, division, 0, kQuad, y, nullptr);
  };
  sinkhorn_start_row(rule, 0, kQuad, logits, y);
  if (begins_with_columns(rule)) {
#pragma unroll
    for (float& x : y) x += constants.eps;
    half_step(ScalarDivision<float>{});
  } else {
    transpose_quad(lane, y);  // the first half-step is of rows
  }
  const int64_t rounds = whole_rounds(rule);
  for (int64_t first = 0; first < rounds; first += SharedRounds<kQuad>::kTogether) {
    const int64_t together = min(rounds - first, SharedRounds<kQuad>::kTogether);
    float least = fminf(fminf(y[0], y[1]), fminf(y[2], y[3]));
    least = fminf(least, __shfl_xor_sync(quad_mask(lane), least, 1));
    least = fminf(least, __shfl_xor_sync(quad_mask(lane), least, 2));
    const bool shares = SharedRounds<kQuad>{rule}.can_share(least);
    for (int64_t step = 0; step < 2 * together; ++step) {
      if (shares) {
        half_step(SharedDivision{});
      } else {
        half_step(ScalarDivision<float>{});
      }
    }
  }
  transpose_quad(lane, y);
}

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
