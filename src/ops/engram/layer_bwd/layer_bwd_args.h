// Arguments of the kernels of the whole layer's backward pass.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"
#include "ops/engram/conv_bwd/conv_bwd_args.h"
#include "ops/engram/gate_bwd/gate_bwd_args.h"
#include "ops/engram/layer/layer_args.h"

namespace ehc::engram {

// Without a convolution the layer is gate_bwd_chunk on `gate`.
struct LayerBackwardArgs {
  GateBackwardArgs gate;  // no statistics, grad_value_path not used with a convolution
  ShortConv conv;
  ConvSumArgs sums;
  float* gate_partials = nullptr;  // [P, n, d]
};

// Floats of scratch for one call of layer_bwd_chunks.
struct LayerBackwardSizes {
  int64_t run;       // tokens at most
  int64_t gradient;  // of ConvGradient
  int64_t value;     // rows of grad_value in the making
  int64_t weights;   // rows of the gate's weight gradient
  int64_t scalars;   // tokens of a chunk and around it, times streams: 6 floats each

  EHC_HD int64_t floats() const { return gradient + value + weights + 6 * scalars; }
};
EHC_HD LayerBackwardSizes layer_bwd_sizes(int64_t tokens, int64_t streams, int64_t hidden,
                                          int64_t history, int64_t element) {
  LayerBackwardSizes s{};
  // x and k of a run are read twice.
  s.run = conv_bwd_run(history, 2 * streams * hidden * element);
  const int64_t row = conv_prepared_row(hidden);
  const ConvGradientSizes sizes = conv_gradient_sizes(history, s.run, streams, hidden);
  s.gradient = sizes.floats(row);
  s.value = sizes.final_rows * row;
  s.weights = streams * row;
  const int64_t around = history < tokens ? history : tokens;
  s.scalars = (2 * around + conv_bwd_chunk(tokens)) * streams;
  return s;
}

// As the steps of conv_bwd_args.h, after conv_bwd_prepare: 1. chunks [begin, end), scratch of
// layer_bwd_sizes; then conv_bwd_sums for the convolution, grad_w_reduce for the gate.
EHC_CPU_KERNEL(void layer_bwd_chunks(const LayerBackwardArgs& args, int64_t begin, int64_t end,
                                     float* scratch));

}  // namespace ehc::engram
