// Steps of the reference of engram.gate_bwd, which the whole layer uses too.
#pragma once

#include <cstring>

#include "ops/engram/gate_bwd/gate_bwd_args.h"

namespace ehc::engram {

// Gradients of tokens [begin, end), and `slopes` [T,n]: dL/dD of every token and stream.
template <class Real>
void gate_bwd_reference_tokens(const GateBackwardArgs& args, Real* slopes, int64_t begin,
                               int64_t end);
// The sum over tokens [begin, end) that is the gradient of the fused weight.
template <class Real>
void gate_bwd_reference_chunk(const GateBackwardArgs& args, const Real* slopes, int64_t begin,
                              int64_t end, const GradWeightRows& grad_weight);

// Where row (t, h) starts.
inline int64_t row_of(const GradientRows& rows, int64_t t, int64_t h) {
  return t * rows.token_stride + h * rows.stream_stride;
}

// An image token. Bytes, not values: a NaN keeps its payload.
inline void write_image_token(const GateBackwardArgs& a, int64_t t) {
  const auto size = static_cast<int64_t>(size_of(a.gate.activation));
  const auto bytes = static_cast<size_t>(a.gate.hidden * size);
  const auto at = [&](const GradientRows& rows, int64_t h) {
    return static_cast<char*>(rows.data) + row_of(rows, t, h) * size;
  };
  for (int64_t h = 0; h < a.gate.streams; ++h) {
    std::memcpy(at(a.grad_residual, h), at(a.grad_out, h), bytes);
    std::memset(at(a.grad_key, h), 0, bytes);
  }
  std::memset(at(a.grad_value, 0), 0, bytes);
}

}  // namespace ehc::engram
