// Which rows take part in a step.
#pragma once

#include "ops/engram/optimizer_step/optimizer_step_args.h"

namespace ehc::engram {

// `total`: the sum of the norms of all rows.
EHC_HD double live_threshold(const OptimizerStepArgs& a, double total) {
  return static_cast<double>(a.tau) * total / static_cast<double>(a.rows);
}

EHC_HD bool lives(float norm, double threshold) { return static_cast<double>(norm) > threshold; }

}  // namespace ehc::engram
