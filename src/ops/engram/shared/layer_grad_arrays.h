// Workspace of the whole layer's backward pass on CUDA, beside the gate's.
#pragma once

#include "ops/engram/gate/gate_args.h"
#include "ops/engram/shared/conv_grad_arrays.h"

namespace ehc::engram {

// All fp32.
struct LayerGradArrays {
  float* value_mean_square;  // [T]
  float* rstd;               // [T,n], of V
  float* grad_value;         // gV, [T,n,d] in rows of conv_prepared_row
  ConvGradArrays conv;
};

inline LayerGradArrays take_layer_grad_arrays(Workspace& workspace, const GateForwardArgs& gate,
                                              const ConvPartials& partials) {
  const int64_t rows = gate.tokens * gate.streams;
  return {workspace.take<float>(gate.tokens), workspace.take<float>(rows),
          workspace.take<float>(rows * conv_prepared_row(gate.hidden)),
          take_conv_grad_arrays(workspace, gate.tokens, gate.streams, gate.hidden, partials)};
}

}  // namespace ehc::engram
