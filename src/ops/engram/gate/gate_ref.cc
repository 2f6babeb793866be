// engram.gate_fwd in plain loops, natural order, in double and in float.
#include <cstring>

#include "ops/engram/shared/gate_reference.h"

namespace ehc::engram {

namespace {

template <class Real>
void write_stream(const GateForwardArgs& a, int64_t t, int64_t h, Real alpha) {
  const int64_t residual = t * a.residual_token_stride + h * a.residual_stream_stride;
  const int64_t out = t * a.out_token_stride + h * a.out_stream_stride;
  for (int64_t i = 0; i < a.hidden; ++i) {
    const Real v = load_float(a.value, a.activation, t * a.value_token_stride + i);
    const Real x = load_float(a.residual, a.activation, residual + i);
    store_float(a.out, a.activation, out + i,
                a.mode == GateMode::add ? std::fma(alpha, v, x) : alpha * v);
  }
}

// Bytes, not values: a NaN keeps its payload.
void write_masked_stream(const GateForwardArgs& a, int64_t t, int64_t h) {
  const auto size = static_cast<int64_t>(size_of(a.activation));
  const auto bytes = static_cast<size_t>(a.hidden * size);
  char* out = static_cast<char*>(a.out) + (t * a.out_token_stride + h * a.out_stream_stride) * size;
  const char* residual = static_cast<const char*>(a.residual) +
                         (t * a.residual_token_stride + h * a.residual_stream_stride) * size;
  if (a.mode == GateMode::value) {
    std::memset(out, 0, bytes);
  } else if (out != residual) {
    std::memcpy(out, residual, bytes);
  }
}

template <class Real>
void gate_reference(const GateForwardArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const bool masked = a.image_token_mask != nullptr && a.image_token_mask[t] != 0;
    for (int64_t h = 0; h < a.streams; ++h) {
      const auto gate = masked ? StreamGate<Real>{} : gate_of_stream<Real>(a, t, h);
      save_gate(a, t, h, gate);
      if (a.mode == GateMode::stats) continue;
      if (masked) {
        write_masked_stream(a, t, h);
      } else {
        write_stream(a, t, h, gate.alpha);
      }
    }
    if (a.value_mean_square != nullptr) {
      a.value_mean_square[t] = masked ? 0.0F : static_cast<float>(mean_square_of_value<Real>(a, t));
    }
  }
}

}  // namespace

void gate_fwd_reference(const GateForwardArgs& args, int64_t begin, int64_t end) {
  gate_reference<double>(args, begin, end);
}
void gate_fwd_reference_f32(const GateForwardArgs& args, int64_t begin, int64_t end) {
  gate_reference<float>(args, begin, end);
}

}  // namespace ehc::engram
