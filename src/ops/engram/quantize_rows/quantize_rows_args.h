// Arguments of the row encoder.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"
#include "ehc/dtype.h"

namespace ehc::engram {

struct QuantizeRowsArgs {
  DType type;  // f32 or bf16
  const void* values;
  int64_t values_stride;
  int64_t width;    // hd
  int64_t group;    // divides hd
  uint8_t* weight;  // row r at r*weight_stride
  uint8_t* scale;   // row r at r*scale_stride
  int64_t weight_stride;
  int64_t scale_stride;
};

// Rows [begin, end).
EHC_CPU_KERNEL(void encode_rows(const QuantizeRowsArgs& args, int64_t begin, int64_t end));

}  // namespace ehc::engram
