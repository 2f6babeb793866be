// Arguments of the kernel that normalises the input of a layer.
#pragma once

#include "backends/cpu/kernel.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

struct LayerNormArgs {
  StreamSizes sizes;
  StreamRows rows;                  // A[T,d]
  StreamRows out;                   // A[T,d]; may be rows
  DType weight_type = DType::none;  // bf16 or f32
  const void* weight = nullptr;     // W[d]
  float eps = 0;
  bool streaming = false;  // store past the caches where rows allow it; no bit depends on it
};

// Tokens [begin, end).
EHC_CPU_KERNEL(void layer_norm_rows(const LayerNormArgs& args, int64_t begin, int64_t end));

// The same in plain loops, in double and in float.
template <class Real>
void layer_norm_reference(const LayerNormArgs& args, int64_t begin, int64_t end);

}  // namespace ehc::mhc
