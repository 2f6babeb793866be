// Functions of the reference loops that the SIMD kernels have in vector form (backends/cpu/simd.h).
#pragma once

#include <cmath>

namespace ehc::engram {

// 1 / (1 + e^-x); neither branch overflows, NaN stays NaN.
template <class Real>
Real logistic(Real x) {
  const Real e = std::exp(-std::fabs(x));
  return (x < 0 ? e : Real(1)) / (Real(1) + e);
}

// x * logistic(x); the product first, so that -inf gives NaN as inf * 0 does.
template <class Real>
Real silu(Real x) {
  return x * logistic(x);
}

}  // namespace ehc::engram
