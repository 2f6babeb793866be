// Arguments of the momentum kernels.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"
#include "ehc/dtype.h"

namespace ehc::engram {

// Factors of one step, in fp32.
struct MomentumFactors {
  float beta = 0;
  float fresh = 0;  // 1 - beta, formed in double
  bool nesterov = false;
};

struct MomentumUpdateArgs {
  int64_t width = 0;              // hd
  DType grad_type = DType::none;  // bf16 or f32
  const void* grad = nullptr;     // W[rows,hd]
  int64_t grad_stride = 0;
  DType momentum_type = DType::none;  // bf16 or f32
  const void* momentum = nullptr;     // W[rows,hd]
  int64_t momentum_stride = 0;
  void* new_momentum = nullptr;  // W[rows,hd], may be `momentum`
  int64_t new_momentum_stride = 0;
  float* update = nullptr;  // F32[rows,hd]
  int64_t update_stride = 0;
  MomentumFactors factors;
  // Store past the caches where rows allow it; no bit depends on it.
  bool streaming = false;
};

// Rows [begin, end).
EHC_CPU_KERNEL(void momentum_update_rows(const MomentumUpdateArgs& args, int64_t begin,
                                         int64_t end));

}  // namespace ehc::engram
