// The momentum of one element, for scalar loops and CUDA; momentum_update_simd.h has it on lanes.
//   m' = fma(m, beta, round((1 - beta) * g))
//   A  = fma(g, 1 - beta, round(beta * m')), or m' without nesterov
#pragma once

#include <cmath>

#include "core/host_device.h"
#include "ops/engram/momentum_update/momentum_update_args.h"

namespace ehc::engram {

struct Moved {
  float update;
  float momentum;  // before it is rounded to its storage type
};

EHC_HD Moved move_element(const MomentumFactors& f, float grad, float momentum) {
  const float moved = std::fma(momentum, f.beta, f.fresh * grad);
  return {f.nesterov ? std::fma(grad, f.fresh, f.beta * moved) : moved, moved};
}

}  // namespace ehc::engram
