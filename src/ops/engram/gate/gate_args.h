// Arguments of the gate kernels: pointers, strides in elements, no framework, no ownership.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"
#include "ehc/dtype.h"

namespace ehc::engram {

enum class GateMode : uint8_t {
  add,    // out = round(residual + alpha * value)
  value,  // out = round(alpha * value)
  stats,  // alpha and value_mean_square, no out
};

// An optional output F32[T,n]; absent when data is null.
struct StreamStatistic {
  float* data = nullptr;
  int64_t token_stride = 0;
};

struct GateForwardArgs {
  int64_t tokens = 0;              // T
  int64_t streams = 0;             // n
  int64_t hidden = 0;              // d
  DType activation = DType::none;  // A: bf16, f16 or f32
  const void* residual = nullptr;  // A[T,n,d]
  int64_t residual_token_stride = 0, residual_stream_stride = 0;
  const void* key = nullptr;  // A[T,n,d]; packed kv: its first n rows
  int64_t key_token_stride = 0, key_stream_stride = 0;
  const void* value = nullptr;  // A[T,d]; packed kv: its last row
  int64_t value_token_stride = 0;
  const float* weight_fused = nullptr;  // [n,d]
  int64_t weight_stream_stride = 0;
  const uint8_t* image_token_mask = nullptr;  // [T] or null; nonzero = image
  void* out = nullptr;                        // A[T,n,d]; may be `residual`; unused in mode stats
  int64_t out_token_stride = 0, out_stream_stride = 0;
  StreamStatistic dot, alpha, rstd_residual, rstd_key;
  float* value_mean_square = nullptr;  // [T] or null
  float eps = 0, clamp = 0;
  GateMode mode = GateMode::add;
  // Store past the caches where rows allow it. No bit depends on it; worth it when the call touches
  // more than the last-level cache holds, and never in place.
  bool streaming = false;
};

// Tokens [begin, end). Everything of a token is written by the call that owns it.
EHC_CPU_KERNEL(void gate_fwd_rows(const GateForwardArgs& args, int64_t begin, int64_t end));

}  // namespace ehc::engram
