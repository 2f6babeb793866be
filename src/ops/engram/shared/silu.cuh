// SiLU and its slope where they are made for every element: the quotient by a reciprocal and one
// Newton step, to one unit in the last place.
#pragma once

#include <cmath>

#include "core/host_device.h"

namespace ehc::engram {

// 1 / x for x in [1, 2].
__device__ __forceinline__ float reciprocal_of_sum(float x) {
  float r = 0;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return fmaf(fmaf(-x, r, 1.0f), r, r);
}

// x * logistic(x); no exponential overflows.
__device__ __forceinline__ float fast_silu(float x) {
  const float e = std::exp(-magnitude(x));
  return (x < 0.0f ? x * e : x) * reciprocal_of_sum(1.0f + e);
}

// silu_slope: s (1 + x (1 - s)), 1 - s without cancellation.
__device__ __forceinline__ float fast_silu_slope(float x) {
  const float e = std::exp(-magnitude(x));
  const float inverse = reciprocal_of_sum(1.0f + e);
  const float s = (x < 0.0f ? e : 1.0f) * inverse;
  const float rest = (x < 0.0f ? 1.0f : e) * inverse;
  return s * (1.0f + x * rest);
}

}  // namespace ehc::engram
