// The norm that gate and convolution share: reference loops, SIMD kernels and CUDA.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace ehc::engram {

// 1 / sqrt(sum/d + eps), each step correctly rounded.
template <class Real>
EHC_HD Real reciprocal_rms(Real sum_squares, int64_t hidden, Real eps) {
  return Real(1) / square_root(sum_squares / static_cast<Real>(hidden) + eps);
}

}  // namespace ehc::engram
