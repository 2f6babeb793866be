// The gate's part of the arguments of the operators that contain it, whose structs have members of
// the same names.
#pragma once

#include "backends/cpu/cache.h"
#include "core/bind.h"
#include "ops/engram/gate/gate_args.h"
#include "ops/engram/shared/kv_group.h"

namespace ehc::engram {

inline StreamStatistic stream_statistic(const Tensor& t) { return {t.as<float>(), t.stride[0]}; }

// What forward and backward read, statistics included: written by the one, read by the other.
// Without the fused weight. Without tokens only the sizes: the pointers may be null and are not
// looked at.
template <class P>
GateForwardArgs gate_inputs(const P& p, const Bound& bound) {
  GateForwardArgs a;
  a.tokens = bound["T"];
  a.streams = bound["n"];
  a.hidden = bound["d"];
  a.activation = p.residual.dtype;
  a.eps = static_cast<float>(p.eps.value_or(0));
  a.clamp = static_cast<float>(*p.clamp);
  if (a.tokens == 0) return a;

  const Tensor key = key_of(p);
  const Tensor value = value_of(p);
  a.residual = p.residual.data;
  a.residual_token_stride = p.residual.stride[0];
  a.residual_stream_stride = p.residual.stride[1];
  a.key = key.data;
  a.key_token_stride = key.stride[0];
  a.key_stream_stride = key.stride[1];
  a.value = value.data;
  a.value_token_stride = value.stride[0];
  a.image_token_mask = p.image_token_mask.template as<uint8_t>();
  if constexpr (requires { p.dot; }) {
    a.dot = stream_statistic(p.dot);
    a.alpha = stream_statistic(p.alpha);
    a.rstd_residual = stream_statistic(p.rstd_residual);
    a.rstd_key = stream_statistic(p.rstd_key);
  }
  return a;
}

// All but the fused weight, the mode and its extra output.
template <class P>
GateForwardArgs gate_call_args(const P& p, const Bound& bound) {
  GateForwardArgs a = gate_inputs(p, bound);
  if (a.tokens == 0) return a;
  a.out = p.out.data;
  a.out_token_stride = p.out.stride[0];
  a.out_stream_stride = p.out.stride[1];
  const auto row_bytes = static_cast<size_t>(a.hidden) * size_of(a.activation);
  const auto rows = static_cast<size_t>(a.tokens * (3 * a.streams + 1));
  a.streaming = a.out != a.residual && rows * row_bytes > last_level_cache_bytes();
  return a;
}

}  // namespace ehc::engram
