// The logistic function and SiLU for reference loops and CUDA; SIMD kernels have their own.
#pragma once

#include <cmath>

#include "core/host_device.h"

namespace ehc {

// 1 / (1 + e^-x), for negative x as e^x / (1 + e^x): no exponential overflows.
template <class Real>
EHC_HD Real logistic(Real x) {
  const Real e = std::exp(-magnitude(x));
  return (x < Real(0) ? e : Real(1)) / (Real(1) + e);
}

// s (1 - s) for s = logistic(x), without cancellation
template <class Real>
EHC_HD Real logistic_slope(Real x) {
  const Real e = std::exp(-magnitude(x));
  return e / ((Real(1) + e) * (Real(1) + e));
}

// x * logistic(x)
template <class Real>
EHC_HD Real silu(Real x) {
  const Real e = std::exp(-magnitude(x));
  return (x < Real(0) ? x * e : x) / (Real(1) + e);
}

}  // namespace ehc
