// The factor by which a token is normalised, shared by reference loops, SIMD kernels and CUDA.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace ehc::mhc {

struct Rms {
  int64_t width = 1;  // values that were squared and added
  float eps = 0;
  bool norm_form = false;  // 1 / (sqrt(mean) + eps) instead of 1 / sqrt(mean + eps)
};

template <class Real>
EHC_HD Real rms_factor(const Rms& rms, Real squares) {
  const Real mean = squares / static_cast<Real>(rms.width);
  const Real eps = rms.eps;
  return Real(1) / (rms.norm_form ? square_root(mean) + eps : square_root(mean + eps));
}

// The gradient of `squares`, given that of the factor r that they gave.
template <class Real>
EHC_HD Real rms_gradient(const Rms& rms, Real squares, Real factor, Real grad_factor) {
  const auto width = static_cast<Real>(rms.width);
  if (!rms.norm_form) {
    return Real(-0.5) * grad_factor * factor / (squares + static_cast<Real>(rms.eps) * width);
  }
  if (squares == Real(0)) return Real(0);
  return Real(-0.5) * grad_factor * factor * factor / (width * square_root(squares / width));
}

}  // namespace ehc::mhc
