// Arguments of the fused weight's kernels.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"
#include "ehc/dtype.h"

namespace ehc::engram {

struct FusedWeightArgs {
  int64_t streams = 0;                  // n
  int64_t hidden = 0;                   // d
  DType hidden_type = DType::none;      // bf16 or f32
  const void* hidden_weight = nullptr;  // W[n,d]
  int64_t hidden_weight_stream_stride = 0;
  DType embed_type = DType::none;      // bf16 or f32
  const void* embed_weight = nullptr;  // W[n,d]
  int64_t embed_weight_stream_stride = 0;
  float* fused = nullptr;  // F32[n,d]
  int64_t fused_stream_stride = 0;
};

// Columns [begin, end) of all n streams.
EHC_CPU_KERNEL(void fused_weight_columns(const FusedWeightArgs& args, int64_t begin, int64_t end));

}  // namespace ehc::engram
