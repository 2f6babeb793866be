// Gate mathematics, shared by the reference loops, the SIMD kernels and CUDA.
//
//   z = ((D * rx) * rk) / sqrt(d)     D = sum (x * wf) * k, rx and rk the reciprocal RMS of x and k
//   s = copysign(sqrt(max(|z|, c)), z)
//   alpha = sigmoid(s), out = round(x + alpha * v)
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "ops/engram/shared/rms_math.h"

namespace ehc::engram {

// d^(-1/2)
template <class Real>
EHC_HD Real gate_scale(int64_t hidden) {
  return static_cast<Real>(1.0 / square_root(static_cast<double>(hidden)));
}

// The association is part of the contract: forward and backward decide the clamp on the same bits.
template <class Real>
EHC_HD Real gate_logit(Real dot, Real rstd_residual, Real rstd_key, Real scale) {
  return ((dot * rstd_residual) * rstd_key) * scale;
}

// NaN passes the clamp: the comparison is false for it.
template <class Real>
EHC_HD Real gate_signed_root(Real logit, Real clamp) {
  const Real size = magnitude(logit);
  return copy_sign(square_root(size < clamp ? clamp : size), logit);
}

}  // namespace ehc::engram
