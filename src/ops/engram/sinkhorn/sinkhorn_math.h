// The scales of the sinkhorn iteration, shared by the reference loops, the SIMD kernels and CUDA.
#pragma once

#include "core/host_device.h"

namespace ehc::engram {

// A division, so that a scale of 0 stays 0 even where 1 / eps leaves the range of fp32.
template <class Real>
EHC_HD Real next_row_scale(Real scale, Real norm, Real eps) {
  return scale / (norm + eps);
}

// What brings a row of this norm to norm alpha. A row of zeros stays one.
template <class Real>
EHC_HD Real row_factor(Real alpha, Real norm, Real eps) {
  return norm == Real(0) ? Real(1) : alpha / (norm + eps);
}

// The root of a sum of squares; `again(unit)` takes the sum in another unit, when the squares left
// the range of fp32.
template <class Again>
EHC_HD float norm_of(float squares, const Again& again) {
  const bool is_small = squares < 0x1p-80f;
  const bool is_large = squares > 0x1.fffffep127f;
  if (is_small || is_large) [[unlikely]] {
    const float unit = is_small ? 0x1p100f : 0x1p-80f;
    return square_root(again(unit)) / unit;
  }
  return square_root(squares);  // NaN too
}

template <class Real>
EHC_HD Real next_col_scale(Real scale, Real sum_of_squares, Real eps) {
  return sum_of_squares == Real(0) ? scale : scale / (square_root(sum_of_squares) + eps);
}

}  // namespace ehc::engram
