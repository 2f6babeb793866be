// The short convolution in plain loops: the reference of engram.conv_fwd and engram.layer_fwd.
#pragma once

#include <cmath>

#include "core/float_formats.h"
#include "core/logistic.h"
#include "ops/engram/conv/conv_args.h"
#include "ops/engram/conv/conv_math.h"

namespace ehc::engram {

struct Sequence {
  int64_t index, begin, end;  // tokens [begin, end)
};

inline Sequence sequence_at(const ShortConv& conv, int64_t tokens, int64_t index) {
  if (conv.cu_seqlens == nullptr) return {0, 0, tokens};
  return {index, conv.cu_seqlens[index], conv.cu_seqlens[index + 1]};
}

inline Sequence sequence_of_token(const ShortConv& conv, int64_t tokens, int64_t t) {
  int64_t index = 0;
  while (sequence_at(conv, tokens, index).end <= t) ++index;
  return sequence_at(conv, tokens, index);
}

// Element of the state that stands for position `t`, before the start of the sequence.
inline int64_t state_position(const ShortConv& conv, const ConvState& state,
                              const Sequence& sequence, int64_t t, int64_t h) {
  const int64_t row = t - sequence.begin + conv_history(conv.taps, conv.dilation);
  return sequence.index * state.sequence_stride + row * state.position_stride +
         h * state.stream_stride;
}

template <class Real>
Real conv_norm_weight(const ShortConv& conv, int64_t h, int64_t i) {
  return load_float(conv.norm_weight, conv.norm_weight_type,
                    h * conv.norm_weight_stream_stride + i);
}

// u at position t, which may lie in the state or nowhere. `normalised(t, h, i)` is u of a token of
// the chunk. Rounded to fp32 also in double, because a later chunk finds it so in its state.
template <class Normalised>
float conv_input(const ShortConv& conv, const Normalised& normalised, const Sequence& sequence,
                 int64_t t, int64_t h, int64_t i) {
  if (t >= sequence.begin) return static_cast<float>(normalised(t, h, i));
  if (conv.state.data == nullptr) return 0;
  return conv.state.data[state_position(conv, conv.state, sequence, t, h) + i];
}

template <class Real, class Normalised>
Real convolve(const ShortConv& conv, const Normalised& normalised, const Sequence& sequence,
              int64_t t, int64_t h, int64_t i) {
  Real c = 0;
  for (int64_t k = 0; k < conv.taps; ++k) {
    const int64_t from = t - conv_lag(conv.taps, conv.dilation, k);
    if (from < sequence.begin && conv.state.data == nullptr) continue;
    const Real weight =
        load_float(conv.conv_weight, conv.weight,
                   h * conv.conv_weight_stream_stride + i * conv.conv_weight_channel_stride + k);
    c = std::fma(weight, static_cast<Real>(conv_input(conv, normalised, sequence, from, h, i)), c);
  }
  return c;
}

// The state after sequences [begin, end). Oldest first, so that a state updated in place only moves
// towards its start.
template <class Normalised>
void write_next_state(const ShortConv& conv, const Normalised& normalised, int64_t tokens,
                      int64_t streams, int64_t hidden, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const Sequence sequence = sequence_at(conv, tokens, b);
    const int64_t length = sequence.end - sequence.begin;
    for (int64_t back = conv_history(conv.taps, conv.dilation); back > 0; --back) {
      for (int64_t h = 0; h < streams; ++h) {
        // The row of the new state that stands for `back` positions before the next chunk.
        const int64_t to =
            state_position(conv, conv.next_state, sequence, sequence.begin - back, h);
        for (int64_t i = 0; i < hidden; ++i) {
          conv.next_state.data[to + i] =
              conv_input(conv, normalised, sequence, sequence.begin + length - back, h, i);
        }
      }
    }
  }
}

}  // namespace ehc::engram
