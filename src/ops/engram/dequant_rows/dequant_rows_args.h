// Arguments of the row decoder.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"
#include "ehc/dtype.h"

namespace ehc::engram {

struct DequantRowsArgs {
  const uint8_t* weight;  // row r at r*weight_stride, e4m3fn
  const uint8_t* scale;   // row r at r*scale_stride, ue8m0
  int64_t weight_stride;
  int64_t scale_stride;
  int64_t width;  // hd
  int64_t group;  // divides hd
  DType type;     // of the values: bf16, f16 or f32
  void* values;   // row r at r*values_stride
  int64_t values_stride;
  // Store past the caches where rows allow it; no bit depends on it.
  bool streaming;
};

// Rows [begin, end).
EHC_CPU_KERNEL(void decode_rows(const DequantRowsArgs& args, int64_t begin, int64_t end));

}  // namespace ehc::engram
