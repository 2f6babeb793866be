// Arguments of the short convolution's kernels: pointers, strides in elements, no ownership.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"
#include "core/host_device.h"
#include "ehc/dtype.h"

namespace ehc::engram {

// F32[B, (w-1)*dilation, n, d], the normalised inputs before a chunk, oldest first.
struct ConvState {
  float* data = nullptr;  // null: no state
  int64_t sequence_stride = 0, position_stride = 0, stream_stride = 0;
};

// What the convolution and the whole layer share.
struct ShortConv {
  int64_t taps = 0;  // w
  int64_t dilation = 1;
  float eps = 0;
  DType weight = DType::none;            // W of conv_weight: bf16 or f32
  DType norm_weight_type = DType::none;  // W of norm_weight, which may differ
  const void* conv_weight = nullptr;     // W[n,d,w]
  int64_t conv_weight_stream_stride = 0, conv_weight_channel_stride = 0;
  const void* norm_weight = nullptr;  // W[n,d]
  int64_t norm_weight_stream_stride = 0;
  const int32_t* cu_seqlens = nullptr;  // [B+1]; null: one sequence
  int64_t sequences = 1;                // B
  ConvState state;                      // before the chunk, read only
  ConvState next_state;                 // after it; may be the same memory as `state`
  // Workspace of conv_prepared_floats: taps and norm weights as fp32 rows in the kernel's order.
  float* prepared = nullptr;
};

struct ConvForwardArgs {
  int64_t tokens = 0;                 // T
  int64_t streams = 0;                // n
  int64_t hidden = 0;                 // d
  DType activation = DType::none;     // A: bf16, f16 or f32
  const void* gated_value = nullptr;  // A[T,n,d]
  int64_t value_token_stride = 0, value_stream_stride = 0;
  const uint8_t* image_token_mask = nullptr;  // [T] or null; nonzero = image
  void* out = nullptr;                        // A[T,n,d], not `gated_value`
  int64_t out_token_stride = 0, out_stream_stride = 0;
  ShortConv conv;
  // Store past the caches where rows allow it; no bit depends on it.
  bool streaming = false;
};

// Floats of one prepared row: d, rounded up to the widest pair of vectors.
EHC_HD int64_t conv_prepared_row(int64_t hidden) { return (hidden + 31) / 32 * 32; }
EHC_HD int64_t conv_prepared_floats(int64_t taps, int64_t streams, int64_t hidden) {
  return (taps + 1) * streams * conv_prepared_row(hidden);
}

// Floats of scratch for one call of conv_fwd_rows over [begin, end), whose history is recomputed.
EHC_HD int64_t conv_scratch_floats(int64_t streams, int64_t history, int64_t begin, int64_t end) {
  return ((history < begin ? history : begin) + end - begin) * streams;
}

// In this order; each step needs all of the one before:
// 1. the weights of streams [begin, end);
EHC_CPU_KERNEL(void conv_prepare(const ConvForwardArgs& args, int64_t begin, int64_t end));
// 2. tokens [begin, end); ranges of 64 tokens and more amortise the recomputed history;
EHC_CPU_KERNEL(void conv_fwd_rows(const ConvForwardArgs& args, int64_t begin, int64_t end,
                                  float* scratch));
// 3. with a state: `next_state` of sequences [begin, end).
EHC_CPU_KERNEL(void conv_state_rows(const ConvForwardArgs& args, int64_t begin, int64_t end));

}  // namespace ehc::engram
