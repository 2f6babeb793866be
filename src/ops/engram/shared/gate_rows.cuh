// Steps of the gate on a block's row, shared by the gate, its backward and the whole layer: same
// functions, same bits.
#pragma once

#include "core/logistic.h"
#include "ops/engram/gate/gate_args.h"
#include "ops/engram/gate/gate_math.h"
#include "ops/engram/shared/row_packs.cuh"

namespace ehc::engram {

inline constexpr int kGatePacks = 2;  // of a thread, for d up to kRowThreads times so many

template <class A>
__device__ __forceinline__ const A* residual_row(const GateForwardArgs& a, int64_t t, int64_t h) {
  return static_cast<const A*>(a.residual) + t * a.residual_token_stride +
         h * a.residual_stream_stride;
}
template <class A>
__device__ __forceinline__ const A* key_row(const GateForwardArgs& a, int64_t t, int64_t h) {
  return static_cast<const A*>(a.key) + t * a.key_token_stride + h * a.key_stream_stride;
}
template <class A>
__device__ __forceinline__ const A* value_row(const GateForwardArgs& a, int64_t t) {
  return static_cast<const A*>(a.value) + t * a.value_token_stride;
}
template <class A>
__device__ __forceinline__ A* out_row(const GateForwardArgs& a, int64_t t, int64_t h) {
  return static_cast<A*>(a.out) + t * a.out_token_stride + h * a.out_stream_stride;
}
__device__ __forceinline__ bool is_image(const uint8_t* mask, int64_t t) {
  return mask != nullptr && mask[t] != 0;
}

struct GateScalars {
  float dot, alpha, rstd_residual, rstd_key;
};

template <class A>
__device__ __forceinline__ void add_squares(const Pack& row, float& sum) {
#pragma unroll
  for (int i = 0; i < kWidth<A>; ++i) sum = fmaf(column<A>(row, i), column<A>(row, i), sum);
}
template <class A>
__device__ __forceinline__ void add_products(const Pack& x, const Pack& k, const float* weight,
                                             float& sum) {
#pragma unroll
  for (int i = 0; i < kWidth<A>; ++i) {
    sum = fmaf(column<A>(x, i) * weight[i], column<A>(k, i), sum);
  }
}

// Sums over a row: x^2, k^2, (x * wf) * k and v^2.
struct GateSums {
  static constexpr int kCount = 4;
  float sum[kCount] = {};

  template <class A>
  __device__ __forceinline__ void add(const Pack& x, const Pack& k, const float* weight) {
    add_squares<A>(x, sum[0]);
    add_squares<A>(k, sum[1]);
    add_products<A>(x, k, weight, sum[2]);
  }
  template <class A>
  __device__ __forceinline__ void add_value(const Pack& v) {
    add_squares<A>(v, sum[3]);
  }
};

// `scale`: gate_scale, which takes doubles and therefore is made on the host.
__device__ __forceinline__ GateScalars gate_scalars_of_norms(float rstd_residual, float rstd_key,
                                                             float dot, const GateForwardArgs& a,
                                                             float scale) {
  const float logit = gate_logit(dot, rstd_residual, rstd_key, scale);
  return {dot, logistic(gate_signed_root(logit, a.clamp)), rstd_residual, rstd_key};
}
__device__ __forceinline__ GateScalars gate_scalars(float residual_squares, float key_squares,
                                                    float dot, const GateForwardArgs& a,
                                                    float scale) {
  return gate_scalars_of_norms(reciprocal_rms(residual_squares, a.hidden, a.eps),
                               reciprocal_rms(key_squares, a.hidden, a.eps), dot, a, scale);
}

__device__ __forceinline__ void save(const StreamStatistic& to, int64_t t, int64_t h, float x) {
  if (to.data != nullptr) to.data[t * to.token_stride + h] = x;
}
__device__ __forceinline__ void save(const GateForwardArgs& a, int64_t t, int64_t h,
                                     const GateScalars& s) {
  save(a.dot, t, h, s.dot);
  save(a.alpha, t, h, s.alpha);
  save(a.rstd_residual, t, h, s.rstd_residual);
  save(a.rstd_key, t, h, s.rstd_key);
}

inline int gate_threads(const GateForwardArgs& a) {
  return row_threads(a.hidden, a.activation, kGatePacks);
}

// Whether all rows that the gate reads move in packs of 16 bytes.
inline bool are_vectors(const GateForwardArgs& a) {
  const auto size = static_cast<int64_t>(size_of(a.activation));
  return a.hidden * size % 16 == 0 &&
         is_vector(a.residual, size, a.residual_token_stride, a.residual_stream_stride) &&
         is_vector(a.key, size, a.key_token_stride, a.key_stream_stride) &&
         is_vector(a.value, size, a.value_token_stride, 0) &&
         is_vector(a.weight_fused, sizeof(float), a.weight_stream_stride, 0);
}

}  // namespace ehc::engram
