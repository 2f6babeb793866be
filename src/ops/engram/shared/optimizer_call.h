// What the tables and arguments of the optimizer's operators share.
#pragma once

#include <algorithm>
#include <string_view>

#include "core/schema.h"
#include "ops/engram/momentum_update/momentum_update_args.h"

namespace ehc::engram {

// An output W whose type is that of an input.
constexpr TensorSpec typed_like(TensorSpec spec, std::string_view input) {
  spec.dtype_rule = DTypeRule::given;
  return spec.dtype_from(input);
}

inline MomentumFactors momentum_factors(double beta, bool nesterov) {
  return {static_cast<float>(beta), static_cast<float>(1 - beta), nesterov};
}

// Rows that are worth a thread: about 16384 elements.
inline int64_t rows_of_grain(int64_t width) { return std::max<int64_t>(1, 16384 / width); }

}  // namespace ehc::engram
