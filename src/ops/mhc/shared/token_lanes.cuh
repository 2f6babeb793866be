// Sinkhorn of four streams with an element of the matrix per lane, sixteen neighbouring lanes a
// token: it is the latency of the chain of half-steps that counts, and so a half-step is four
// shuffles side by side, a sum and one division. The operations are those of sinkhorn_matrix.
#pragma once

#include "backends/cuda/sums.cuh"
#include "ops/mhc/shared/token_steps.cuh"

namespace ehc::mhc {

inline constexpr int kLaneStreams = 4;
inline constexpr int kLanesOfToken = kLaneStreams * kLaneStreams;

// The element of the matrix that this lane has; blocks may have any shape.
__device__ __forceinline__ int element_of_lane() {
  unsigned lane = 0;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return static_cast<int>(lane % kLanesOfToken);
}

// What the lanes of this one's row (or column) have, in ascending order. All lanes of a warp take
// part, here and below.
template <bool kRows>
__device__ __forceinline__ void gather_line(float x, float (&line)[kLaneStreams]) {
  const int column = element_of_lane() % kLaneStreams;
#pragma unroll
  for (int k = 0; k < kLaneStreams; ++k) {
    line[k] = kRows ? __shfl_sync(cuda::kAllLanes, x, k, kLaneStreams)
                    : __shfl_sync(cuda::kAllLanes, x, k * kLaneStreams + column, kLanesOfToken);
  }
}

template <bool kRows>
__device__ __forceinline__ float sum_of_line(float x) {
  float line[kLaneStreams];
  gather_line<kRows>(x, line);
  return line_sum<true, float>(0, kLaneStreams, [&](int64_t, int64_t e) { return line[e]; });
}

// What the way back needs of the half-steps of a token: [2 repeat, n] in shared memory, rows and
// columns in turn. Null: nothing is kept.
struct KeptDivisors {
  float* data = nullptr;

  template <bool kRows>
  __device__ __forceinline__ float& of_line(int round) const {
    const int e = element_of_lane();
    const int line = kRows ? e / kLaneStreams : e % kLaneStreams;
    return data[(2 * round + (kRows ? 0 : 1)) * kLaneStreams + line];
  }
};

// `least` takes the least dividend.
template <bool kRows, class Division>
__device__ __forceinline__ void half_step_of_lanes(const SinkhornRule& rule,
                                                   const Division& division, int round,
                                                   const KeptDivisors& kept, float& y,
                                                   float& least) {
  const SinkhornConstants<float> constants = sinkhorn_constants<float>(rule);
  const float sum = sum_of_line<kRows>(y);
  const float divisor = sinkhorn_divisor(rule, constants, sum);
  if (kept.data != nullptr) {
    kept.of_line<kRows>(round) = sinkhorn_kept(rule, constants, sum, divisor);
  }
  least = fminf(least, y);
  y = division(divisor)(y);
}

template <class Division>
__device__ __forceinline__ float iterate_lanes(const SinkhornRule& rule, const Division& division,
                                               const KeptDivisors& kept, float y, float& least) {
  int round = 0;
  if (begins_with_columns(rule)) {
    y += rule.eps;
    half_step_of_lanes<false>(rule, division, round++, kept, y, least);
  }
  const int repeat = static_cast<int>(rule.repeat);
#pragma unroll 1
  for (; round < repeat; ++round) {
    half_step_of_lanes<true>(rule, division, round, kept, y, least);
    half_step_of_lanes<false>(rule, division, round, kept, y, least);
  }
  return y;
}

// From what the half-steps start from to the last iterate, of a form that the compiler knows.
// Divides by SharedDivision throughout, and if any dividend of the warp was too small for it, once
// more.
template <SinkhornForm kForm>
__device__ __forceinline__ float iterate_lanes(SinkhornRule rule, const KeptDivisors& kept,
                                               float start) {
  rule.form = kForm;
  float least = 1;
  const float y = iterate_lanes(rule, SharedDivision{}, kept, start, least);
  const bool right = SharedRounds<kLaneStreams>{rule}.can_share(least);
  if (__all_sync(cuda::kAllLanes, right)) return y;
  return iterate_lanes(rule, ScalarDivision<float>{}, kept, start, least);
}
__device__ __forceinline__ float iterate_lanes(const SinkhornRule& rule, const KeptDivisors& kept,
                                               float start) {
  if (rule.form == SinkhornForm::deepseek) {
    return iterate_lanes<SinkhornForm::deepseek>(rule, kept, start);
  }
  return iterate_lanes<SinkhornForm::megatron>(rule, kept, start);
}

// sinkhorn_start of the lane's element, but for eps.
__device__ __forceinline__ float start_lanes(const SinkhornRule& rule, float logit) {
  float row[kLaneStreams];
  gather_line<true>(logit, row);
  const float largest =
      line_maximum<true, float>(0, kLaneStreams, [&](int64_t, int64_t e) { return row[e]; });
  const float start = exp_nonpositive(logit - largest);
  return rule.form == SinkhornForm::deepseek ? start / sum_of_line<true>(start) : start;
}

__device__ __forceinline__ float sinkhorn_lanes_on_logarithms(const SinkhornRule& rule,
                                                              float logit) {
  float of_row = 0;
  float of_column = 0;
  const auto potential = [&](const float(&x)[kLaneStreams]) {
    return sinkhorn_potential<true, float>(0, kLaneStreams,
                                           [&](int64_t, int64_t e) { return x[e]; });
  };
  float x[kLaneStreams];
  for (int64_t round = 0; round < rule.repeat; ++round) {
    gather_line<true>(logit - of_column, x);
    of_row = potential(x);
    gather_line<false>(logit - of_row, x);
    of_column = potential(x);
  }
  return exp_nonpositive(logit - of_row - of_column);
}

// comb of logits, of both the lane's element.
__device__ __forceinline__ float sinkhorn_lanes(const SinkhornRule& rule, float logit) {
  if (rule.form == SinkhornForm::log) return sinkhorn_lanes_on_logarithms(rule, logit);
  return iterate_lanes(rule, KeptDivisors{}, start_lanes(rule, logit));
}

template <bool kRows>
__device__ __forceinline__ void half_step_back_of_lanes(const SinkhornRule& rule, float divisor,
                                                        float& y, float& grad) {
  const SinkhornConstants<float> constants = sinkhorn_constants<float>(rule);
  float pulled = sum_of_line<kRows>(grad * y);
  sinkhorn_unclamp(rule, constants, pulled, divisor);
  grad = (grad - pulled) * (constants.one / divisor);
  y *= divisor;
}

// The gradient of a logit, given that of comb; not on logarithms. `kept` is room for the token.
__device__ __forceinline__ float sinkhorn_lanes_back(const SinkhornRule& rule,
                                                     const KeptDivisors& kept, float logit,
                                                     float grad) {
  const float start = start_lanes(rule, logit);
  float y = iterate_lanes(rule, kept, start);
  __syncwarp();
  int round = static_cast<int>(rule.repeat) - 1;
#pragma unroll 1
  for (; round > 0 || (round == 0 && !begins_with_columns(rule)); --round) {
    const float of_columns = kept.of_line<false>(round);
    const float of_rows = kept.of_line<true>(round);
    half_step_back_of_lanes<false>(rule, of_columns, y, grad);
    half_step_back_of_lanes<true>(rule, of_rows, y, grad);
  }
  if (round == 0) half_step_back_of_lanes<false>(rule, kept.of_line<false>(0), y, grad);
  const float pulled = sum_of_line<true>(grad * start);
  return (rule.form == SinkhornForm::deepseek ? grad - pulled : grad) * start;
}

}  // namespace ehc::mhc
