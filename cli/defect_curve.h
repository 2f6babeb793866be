// How fast Sinkhorn's iteration makes maps doubly stochastic.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ehc/context.h"
#include "ehc/mhc/presets.h"
#include "ehc/tensor.h"

namespace ehc::cli {

// Of the maps after `repeat` rounds: how far sums of rows and columns are from 1.
struct DefectPoint {
  int64_t repeat = 0;
  float row_worst = 0;
  float row_median = 0;
  float column_worst = 0;
  float column_median = 0;
};

// One point for each number of rounds. `logits` F32[L, T, n, n], not empty, without NaN.
std::vector<DefectPoint> defect_curve(Context& context, const Tensor& logits,
                                      std::span<const int64_t> repeats, const mhc::MixPreset& mix);

}  // namespace ehc::cli
