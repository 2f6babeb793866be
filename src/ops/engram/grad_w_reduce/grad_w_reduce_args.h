// Arguments of the kernels that sum the partial gradients of the gate's weights.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"
#include "ehc/dtype.h"

namespace ehc::engram {

struct FactorRows {
  DType type = DType::none;  // bf16 or f32
  const void* data = nullptr;
  int64_t stream_stride = 0;
};

// The gradient of one of the weights: `other` is the factor it stands beside.
struct WeightGradient {
  FactorRows other;                    // W[n,d]
  const float* accumulated = nullptr;  // F32[n,d] or null; may be `grad`
  int64_t accumulated_stream_stride = 0;
  float* grad = nullptr;  // F32[n,d]
  int64_t grad_stream_stride = 0;
};

struct GradWReduceArgs {
  int64_t partials = 0;            // P
  int64_t streams = 0;             // n
  int64_t hidden = 0;              // d
  const float* partial = nullptr;  // F32[P,n,d]; null when P is 0
  int64_t partial_stride = 0, partial_stream_stride = 0;
  WeightGradient of_hidden, of_embed;
};

// Columns [begin, end) of one stream.
EHC_CPU_KERNEL(void grad_w_reduce_columns(const GradWReduceArgs& args, int64_t stream,
                                          int64_t begin, int64_t end));

}  // namespace ehc::engram
