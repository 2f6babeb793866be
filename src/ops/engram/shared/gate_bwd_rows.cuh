// Steps of the gate's backward pass on a block's rows, shared by its kernels: same functions, same
// bits.
#pragma once

#include "ops/engram/gate_bwd/gate_bwd_args.h"
#include "ops/engram/gate_bwd/gate_bwd_math.h"
#include "ops/engram/shared/gate_rows.cuh"

namespace ehc::engram {

inline constexpr int kWindow = 32;
inline constexpr int kMaxStreams = 8;

// A pack a thread, and more blocks where that is not enough.
template <class A>
int gate_bwd_threads(const GateForwardArgs& a) {
  const int64_t packs = cuda::packs_of(a.hidden, kWidth<A>);
  return static_cast<int>(std::min<int64_t>((packs + 31) / 32 * 32, kMostThreads));
}

template <class A>
__device__ __forceinline__ A* row_of(const GradientRows& rows, int64_t t, int64_t h = 0) {
  return static_cast<A*>(rows.data) + t * rows.token_stride + h * rows.stream_stride;
}

// What the statistics of a token and stream say about its gradients.
struct TokenScalars {
  float slope_of_alpha;  // slope / grad_alpha
  float pull_residual, pull_key;
  bool is_flat, is_image;
};

struct Slopes {
  float slope, pull_residual, pull_key;

  Slopes() = default;
  __device__ __forceinline__ Slopes(const TokenScalars& s, float grad_alpha)
      : slope(s.is_flat ? 0.0f : grad_alpha * s.slope_of_alpha),
        pull_residual(s.pull_residual),
        pull_key(s.pull_key) {}
};

__device__ __forceinline__ TokenScalars scalars_of(const GateForwardArgs& a, float scale, float dot,
                                                   float alpha, float rstd_residual,
                                                   float rstd_key) {
  const float size = magnitude(gate_logit(dot, rstd_residual, rstd_key, scale));
  return {gate_slope(1.0f, dot, alpha, rstd_residual, rstd_key, scale, a.clamp),
          gate_pull(dot, rstd_residual, a.hidden), gate_pull(dot, rstd_key, a.hidden),
          gate_is_flat(size, dot, a.clamp), false};
}
__device__ __forceinline__ TokenScalars scalars_of(const GateForwardArgs& a, float scale, int64_t t,
                                                   int64_t h) {
  const auto at = [&](const StreamStatistic& from) {
    return __ldg(from.data + t * from.token_stride + h);
  };
  return scalars_of(a, scale, at(a.dot), at(a.alpha), at(a.rstd_residual), at(a.rstd_key));
}

// What the threads of a block share about the tokens that come next, for kStreams streams from one
// on.
template <int kStreams = 1>
struct TokenWindow {
  TokenScalars scalars[kWindow][kStreams];
  float alpha[kWindow][kMaxStreams];
  WarpSums<1> sums[2];

  // Tokens [begin, end), at most kWindow of them; each(i, t) is called by the thread of token t.
  template <class Each>
  __device__ __forceinline__ void fill(const GateForwardArgs& a, float scale, int64_t begin,
                                       int64_t end, int64_t h, const Each& each) {
    __syncthreads();
    for (int64_t t = begin + threadIdx.x; t < end; t += blockDim.x) {
      const int i = static_cast<int>(t - begin);
      each(i, t);
      const bool image = is_image(a.image_token_mask, t);
#pragma unroll 1
      for (int s = 0; s < kStreams; ++s) {
        if (image) {
          scalars[i][s].is_image = true;
        } else {
          scalars[i][s] = scalars_of(a, scale, t, h + s);
        }
      }
      if (image) continue;
      const float* of_token = a.alpha.data + t * a.alpha.token_stride;
#pragma unroll 1
      for (int64_t s = 0; s < a.streams; ++s) alpha[i][s] = __ldg(of_token + s);
    }
    __syncthreads();
  }
};

// grad_x and grad_k of a pack; adds its part of grad_wf. The weights are `weight`.
template <class A, class Store>
__device__ __forceinline__ void gate_gradients(const Slopes& s, const Pack& grad, const Pack& x,
                                               const Pack& k, const float (&weight)[kWidth<A>],
                                               float (&grad_weight)[kWidth<A>],
                                               const Store& store) {
  const Pack of_residual = cuda::make_pack<A>([&](int i) {
    const float pulled = fmaf(-s.pull_residual, column<A>(x, i), column<A>(k, i) * weight[i]);
    return fmaf(s.slope, pulled, column<A>(grad, i));
  });
  const Pack of_key = cuda::make_pack<A>([&](int i) {
    return fmaf(-s.pull_key, column<A>(k, i), column<A>(x, i) * weight[i]) * s.slope;
  });
  store(of_residual, of_key);
#pragma unroll
  for (int i = 0; i < kWidth<A>; ++i) {
    grad_weight[i] = fmaf(column<A>(x, i) * s.slope, column<A>(k, i), grad_weight[i]);
  }
}

// The sum of a chunk for a thread's pack.
template <int kColumns>
__device__ __forceinline__ void store_sums(float* to, int count, const float (&sums)[kColumns]) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (i < count) to[i] = sums[i];
  }
}

}  // namespace ehc::engram
