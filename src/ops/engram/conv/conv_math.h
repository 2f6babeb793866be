// Short convolution mathematics, shared by the reference loops, the SIMD kernels and CUDA.
//
//   u[t] = (V[t] * rstd) * g            rstd = 1/sqrt(mean(V^2) + eps) over d, per stream
//   c[t] = sum over taps k = 0 .. w-1, from +0, of W[k] * u[t - (w-1-k)*dilation]   (fma)
//   Y[t] = V[t] + silu(c[t])
// A tap before the start of the sequence (and of the state, if there is one) is left out.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "ops/engram/shared/rms_math.h"

namespace ehc::engram {

// alpha times the reciprocal RMS of V = alpha * v, without forming V: u = (v * beta) * g.
template <class Real>
EHC_HD Real conv_beta(Real alpha, Real value_mean_square, Real eps) {
  return alpha / square_root(alpha * alpha * value_mean_square + eps);
}

// Rows of state: normalised inputs that a chunk needs from before its start.
EHC_HD int64_t conv_history(int64_t taps, int64_t dilation) { return (taps - 1) * dilation; }

// How far back tap k reaches.
EHC_HD int64_t conv_lag(int64_t taps, int64_t dilation, int64_t tap) {
  return (taps - 1 - tap) * dilation;
}

// The first tap that does not reach back further than `available` positions.
EHC_HD int64_t conv_first_tap(int64_t taps, int64_t dilation, int64_t available) {
  const int64_t reach = available / dilation;
  return reach >= taps - 1 ? 0 : taps - 1 - reach;
}

}  // namespace ehc::engram
