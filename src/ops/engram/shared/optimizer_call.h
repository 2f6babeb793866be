// What the arguments of the optimizer's operators share.
#pragma once

#include <algorithm>

#include "ops/engram/momentum_update/momentum_update_args.h"

namespace ehc::engram {

inline MomentumFactors momentum_factors(double beta, bool nesterov) {
  return {static_cast<float>(beta), static_cast<float>(1 - beta), nesterov};
}

// Rows that are worth a thread: about 16384 elements.
inline int64_t rows_of_grain(int64_t width) { return std::max<int64_t>(1, 16384 / width); }

}  // namespace ehc::engram
