// The rule of an iteration from the attributes of a call.
#pragma once

#include "ehc/mhc/sinkhorn.h"
#include "ops/mhc/sinkhorn/sinkhorn_args.h"

namespace ehc::mhc {

inline SinkhornRule sinkhorn_rule(int64_t streams, int64_t repeat, double eps,
                                  SinkhornConvention convention) {
  SinkhornForm form = SinkhornForm::deepseek;
  if (convention == SinkhornConvention::megatron) form = SinkhornForm::megatron;
  if (convention == SinkhornConvention::log) form = SinkhornForm::log;
  return {streams, repeat, static_cast<float>(eps), form};
}

}  // namespace ehc::mhc
