// One mix of a token and its gradient, for scalar loops and CUDA.
#pragma once

#include <cmath>

#include "core/logistic.h"

namespace ehc::mhc {

// What a sigmoid looks at.
template <class Real>
EHC_HD Real mix_logit(Real mix, Real scale, Real base) {
  return std::fma(mix, scale, base);
}

// factor * sigmoid(u) + shift; of pre the factor is 1, of post the shift is 0.
template <class Real>
EHC_HD Real mix_gate(Real logit, Real factor, Real shift) {
  return std::fma(logistic(logit), factor, shift);
}

// The gradient of the logit, given that of mix_gate.
template <class Real>
EHC_HD Real mix_gate_gradient(Real logit, Real factor, Real grad) {
  return grad * factor * logistic_slope(logit);
}

}  // namespace ehc::mhc
