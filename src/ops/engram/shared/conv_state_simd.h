// The state that the convolution and the whole layer leave behind a sequence.
#pragma once

#include "ops/engram/conv/conv_simd.h"

namespace ehc::engram::EHC_ISA {
namespace {

struct ConvShape {
  int64_t streams, hidden, tokens;
  const uint8_t* mask;
};

// The state after a sequence; scale_of(token, stream) is what ConvSource::scale holds. Rows are
// written oldest first, so that a state that is updated in place only moves down.
template <class A, class Scale>
inline void next_state(const ShortConv& conv, const ConvShape& shape, const A* values,
                       int64_t token_stride, int64_t stream_stride, int64_t sequence,
                       const Scale& scale_of) {
  const ConvState& to = conv.next_state;
  const int64_t history = conv_history(conv.taps, conv.dilation);
  const int64_t start = conv.cu_seqlens ? conv.cu_seqlens[sequence] : 0;
  const int64_t end = conv.cu_seqlens ? conv.cu_seqlens[sequence + 1] : shape.tokens;
  const PreparedWeights weights = prepared_weights(conv, shape.streams, shape.hidden);
  const ConvRun run = {start, end, sequence, start};
  for (int64_t r = 0; r < history; ++r) {
    const int64_t token = end - history + r;
    const bool before = token < start, zero = !before && shape.mask && shape.mask[token];
    for (int64_t h = 0; h < shape.streams; ++h) {
      float* row =
          to.data + sequence * to.sequence_stride + r * to.position_stride + h * to.stream_stride;
      const float* old = before ? state_row(conv, conv.state, run, token, h) : nullptr;
      const bool read = !before && !zero;
      const A* value = read ? values + token * token_stride + h * stream_stride : nullptr;
      const float scale = read ? scale_of(token, h) : 0.0f;
      for (int64_t i = 0; i < shape.hidden; i += kPair) {
        const int64_t count = shape.hidden - i;
        Pair u = simd::zero_pair();
        if (before) {
          u = simd::load_some(old + i, count);
        } else if (!zero) {
          u = simd::natural_order<A>(
              normalise(simd::load_some(value + i, count), scale, weights.norm(h) + i));
        }
        simd::store_some(row + i, u, count, false);
      }
    }
  }
}

}  // namespace
}  // namespace ehc::engram::EHC_ISA
