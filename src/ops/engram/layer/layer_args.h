// Arguments of the whole layer's kernels: those of the gate and of the convolution.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"
#include "ops/engram/conv/conv_args.h"
#include "ops/engram/gate/gate_args.h"

namespace ehc::engram {

// A weight W[n,d] as the caller gave it.
struct StreamWeight {
  DType type = DType::none;  // bf16 or f32
  const void* data = nullptr;
  int64_t stream_stride = 0;
};

// Without a convolution the layer is gate_fwd_rows on `gate`.
struct LayerForwardArgs {
  GateForwardArgs gate;  // mode add, out not in place; weight_fused = hidden_weight * embed_weight
  ShortConv conv;
  StreamWeight hidden_weight, embed_weight;
  bool round_twice = false;  // round(round(x + alpha*v) + silu(c)), else one rounding of the sum
};

// Floats of scratch for one call of layer_fwd_rows over [begin, end), whose history is recomputed.
EHC_HD int64_t layer_scratch_floats(int64_t streams, int64_t history, int64_t begin, int64_t end) {
  return 2 * conv_scratch_floats(streams, history, begin, end);
}

// As the steps of the convolution (conv_args.h), with the same units and order.
EHC_CPU_KERNEL(void layer_prepare(const LayerForwardArgs& args, int64_t begin, int64_t end));
EHC_CPU_KERNEL(void layer_fwd_rows(const LayerForwardArgs& args, int64_t begin, int64_t end,
                                   float* scratch));
EHC_CPU_KERNEL(void layer_state_rows(const LayerForwardArgs& args, int64_t begin, int64_t end));

}  // namespace ehc::engram
