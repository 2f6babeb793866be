// Targets of accumulation: the input `X_acc` is what an operator adds its sums for output X to.
#pragma once

#include "core/operator.h"

namespace ehc {

// Where a call has no tokens (T = 0, or P = 0 where partials are summed) there is nothing to add,
// and a target keeps its bits: adding zeros would turn -0 into +0. Then this writes the outputs
// that have targets, and zeros to all others. False, and nothing done, for any other call.
bool write_targets_of_nothing(const Schema& schema, const Call& call);

}  // namespace ehc
