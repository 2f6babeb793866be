// What the backward operators of the convolution and of the whole layer add to conv_call.h.
#pragma once

#include "ops/engram/conv_bwd/conv_bwd_args.h"
#include "ops/engram/shared/conv_call.h"

namespace ehc::engram {

// F32[n,d,w] or F32[n,d], and its target of accumulation or none.
inline ConvWeightGradient conv_weight_gradient(const Tensor& gradient, const Tensor& target) {
  ConvWeightGradient g;
  g.data = gradient.as<float>();
  g.stream_stride = gradient.stride[0];
  g.target = target.as<float>();
  if (target) g.target_stream_stride = target.stride[0];
  if (gradient.rank == 3) {
    g.channel_stride = gradient.stride[1];
    if (target) g.target_channel_stride = target.stride[1];
  }
  return g;
}

// Without the memory of the partial sums.
template <class P>
ConvSumArgs conv_sums(const P& p, const Bound& bound, DType activation) {
  return {
      activation,
      bound["d"],
      {nullptr, conv_bwd_chunks(bound["T"]), bound["n"], bound["w"], conv_prepared_row(bound["d"])},
      conv_weight_gradient(p.grad_conv_weight, p.grad_conv_weight_acc),
      conv_weight_gradient(p.grad_conv_norm_weight, p.grad_conv_norm_weight_acc)};
}

}  // namespace ehc::engram
