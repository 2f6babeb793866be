// Arguments of the amax_gain kernel.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"

namespace ehc::mhc {

// F32[L,T].
struct LayerGains {
  float* data = nullptr;
  int64_t layer_stride = 0, token_stride = 0;
};

struct AmaxGainArgs {
  int64_t layers = 0;           // L
  int64_t streams = 0;          // n
  const float* comb = nullptr;  // F32[L,T,n,n]
  int64_t comb_layer_stride = 0, comb_token_stride = 0, comb_row_stride = 0;
  LayerGains forward, backward;
  float* composite_forward = nullptr;   // F32[T]
  float* composite_backward = nullptr;  // F32[T]
};

// Tokens [begin, end).
EHC_CPU_KERNEL(void amax_gain_tokens(const AmaxGainArgs& args, int64_t begin, int64_t end));

}  // namespace ehc::mhc
