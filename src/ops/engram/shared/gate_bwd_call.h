// The gate's part of the arguments of the backward operators that contain it, whose structs have
// members of the same names.
#pragma once

#include "ops/engram/gate_bwd/gate_bwd_args.h"
#include "ops/engram/shared/gate_call.h"

namespace ehc::engram {

inline GradientRows gradient_rows(const Tensor& t) {
  return {t.data, t.stride[0], t.rank == 3 ? t.stride[1] : 0};
}

// Without the fused weight and the gradient of the value path. Without tokens only the sizes.
template <class P>
GateBackwardArgs gate_bwd_call_args(const P& p, const Bound& bound) {
  GateBackwardArgs a;
  a.gate = gate_inputs(p, bound);
  if (a.gate.tokens == 0) return a;
  a.grad_out = gradient_rows(p.grad_out);
  a.grad_residual = gradient_rows(p.grad_residual);
  a.grad_key = gradient_rows(grad_key_of(p));
  a.grad_value = gradient_rows(grad_value_of(p));
  const auto row_bytes = static_cast<size_t>(a.gate.hidden) * size_of(a.gate.activation);
  const auto rows = static_cast<size_t>(a.gate.tokens * (5 * a.gate.streams + 2));
  a.streaming = rows * row_bytes > last_level_cache_bytes();
  return a;
}

}  // namespace ehc::engram
