// Mathematics of the convolution's backward pass, shared by the reference loops, the SIMD kernels
// and CUDA.
//
//   gc[t] = G[t] * silu'(c[t])
//   gu[t] = sum over j = 0 .. w-1, from +0, of W[w-1-j] * gc[t + j*dilation]   (fma)
//   gV[t] = G[t] + r * (g gu - n * mean(g gu n))    n = V r, the row without its norm weight
// The last line is the derivative of n g by V: dn = r (dV - n mean(n dV)).
#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "ops/engram/conv/conv_math.h"

namespace ehc::engram {

// d/dx (x sigmoid(x)) = s (1 + x (1 - s)); 1 - s without cancellation.
template <class Real>
EHC_HD Real silu_slope(Real x) {
  const Real e = std::exp(-magnitude(x));
  const Real inverse = Real(1) / (Real(1) + e);
  const Real s = (x < Real(0) ? e : Real(1)) * inverse;
  const Real rest = (x < Real(0) ? Real(1) : e) * inverse;
  return s * (Real(1) + x * rest);
}

// The reciprocal RMS of V = alpha * v, without forming V: conv_beta / alpha.
template <class Real>
EHC_HD Real conv_rstd(Real alpha, Real value_mean_square, Real eps) {
  return Real(1) / square_root(alpha * alpha * value_mean_square + eps);
}

// How many taps j = 0, 1, ... see a token that `later` tokens of its sequence follow.
EHC_HD int64_t conv_seen_by(int64_t taps, int64_t dilation, int64_t later) {
  const int64_t reach = later / dilation;
  return reach >= taps - 1 ? taps : reach + 1;
}

}  // namespace ehc::engram
