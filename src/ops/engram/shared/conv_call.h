// The convolution's part of the arguments of the operators that contain it, whose structs have
// members of the same names.
#pragma once

#include <algorithm>

#include "core/operator.h"
#include "core/parallel.h"
#include "ops/engram/conv/conv_args.h"

namespace ehc::engram {

inline ConvState conv_state(const Tensor& t) {
  return {t.as<float>(), t.stride[0], t.stride[1], t.stride[2]};
}

template <class P>
ShortConv short_conv(const P& p, const Bound& bound) {
  ShortConv conv;
  conv.taps = bound["w"];
  conv.dilation = *p.dilation;
  if constexpr (requires { p.state; }) {
    conv.state = conv_state(p.state);
    conv.next_state = conv_state(p.new_state);
  }
  // Without a state no tap reaches further back than the first token; this keeps products small.
  if (conv.state.data == nullptr) {
    conv.dilation = std::min(conv.dilation, std::max<int64_t>(1, bound["T"]));
  }
  conv.eps = static_cast<float>(*p.conv_eps);
  conv.weight = p.conv_weight.dtype;
  conv.conv_weight = p.conv_weight.data;
  conv.conv_weight_stream_stride = p.conv_weight.stride[0];
  conv.conv_weight_channel_stride = p.conv_weight.stride[1];
  conv.norm_weight_type = p.conv_norm_weight.dtype;
  conv.norm_weight = p.conv_norm_weight.data;
  conv.norm_weight_stream_stride = p.conv_norm_weight.stride[0];
  conv.cu_seqlens = p.cu_seqlens.template as<const int32_t>();
  conv.sequences = bound["B"];
  return conv;
}

// One range of tokens per thread; ranges that are not much longer than their history would
// recompute too much of it.
inline Pieces cut_tokens(const Call& call) {
  const int64_t row = call.bound["n"] * call.bound["d"];
  return {call.context, call.bound["T"], std::max<int64_t>(16, 32768 / row)};
}

}  // namespace ehc::engram
