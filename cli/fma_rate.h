// The ceiling of arithmetic: how many fp32 operations this machine does right now.
#pragma once

#include "ehc/context.h"

namespace ehc::cli {

// Fused multiply-adds on registers, on the threads of a CPU context; each counts as two operations.
class FmaRate {
 public:
  explicit FmaRate(const Context& context) : context_(context) {}
  // Operations per second, the best of now and of any earlier call; 0 on another device.
  double measure();

 private:
  Context context_;
  double best_ = 0;
};

}  // namespace ehc::cli
