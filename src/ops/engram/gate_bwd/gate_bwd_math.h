// Mathematics of the gate's backward pass, shared by the reference loops, the SIMD kernels and
// CUDA.
//
//   slope = dL/dD with both reciprocal RMS held fixed
//         = grad_alpha * alpha (1 - alpha) / 2 * sqrt(q / |D|),  q = rx * rk / sqrt(d), z = D * q
//           0 where the clamp is flat (|z| < c) and where D = 0
//   grad_x = grad + slope * (k * wf - x * D rx^2 / d)     d rx / d x = -rx^3 x / d
//   grad_k =        slope * (x * wf - k * D rk^2 / d)
//   grad_wf = sum over tokens of slope * x * k
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "ops/engram/gate/gate_math.h"

namespace ehc::engram {

// Where no gradient passes; `size` = |z|.
template <class Real>
EHC_HD bool gate_is_flat(Real size, Real dot, Real clamp) {
  return size < clamp || size == Real(0) || dot == Real(0);
}

// dL/dD. sqrt(q / |D|) as q / sqrt(|z|): the quotient of the former may overflow.
template <class Real>
EHC_HD Real gate_slope(Real grad_alpha, Real dot, Real alpha, Real rstd_residual, Real rstd_key,
                       Real scale, Real clamp) {
  const Real size = magnitude(gate_logit(dot, rstd_residual, rstd_key, scale));
  if (gate_is_flat(size, dot, clamp)) return Real(0);
  const Real root = (rstd_residual * scale) * rstd_key / square_root(size);
  return grad_alpha * (alpha * (Real(1) - alpha)) * Real(0.5) * root;
}

// D r^2 / d: what the norm of a row takes back of each of its elements.
template <class Real>
EHC_HD Real gate_pull(Real dot, Real rstd, int64_t hidden) {
  return (dot * rstd) * rstd / static_cast<Real>(hidden);
}

}  // namespace ehc::engram
