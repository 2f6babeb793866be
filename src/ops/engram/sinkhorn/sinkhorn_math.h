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

template <class Real>
EHC_HD Real next_col_scale(Real scale, Real sum_of_squares, Real eps) {
  return sum_of_squares == Real(0) ? scale : scale / (square_root(sum_of_squares) + eps);
}

}  // namespace ehc::engram
