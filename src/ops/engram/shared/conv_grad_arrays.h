// Workspace of the convolution's backward pass on CUDA.
#pragma once

#include "core/workspace.h"
#include "ops/engram/conv_bwd/conv_bwd_args.h"

namespace ehc::engram {

// All fp32.
struct ConvGradArrays {
  float* scales;     // [T,n]
  float* grad_conv;  // [T,n,d]
  float* row_sums;   // [T,n,warps]
  float* means;      // [T,n]
  float* partials;   // of ConvPartials
};

inline ConvGradArrays take_conv_grad_arrays(Workspace& workspace, int64_t tokens, int64_t streams,
                                            int64_t hidden, const ConvPartials& partials) {
  const int64_t rows = tokens * streams;
  const int64_t row = conv_prepared_row(hidden);
  return {workspace.take<float>(rows), workspace.take<float>(rows * row),
          workspace.take<float>(rows * (row / 32)), workspace.take<float>(rows),
          workspace.take<float>(partials.floats())};
}

}  // namespace ehc::engram
