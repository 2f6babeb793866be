// Arguments of the gather from 8-bit rows.
#pragma once

#include "backends/cpu/kernel.h"
#include "ehc/dtype.h"
#include "ops/engram/shared/row_indices.h"

namespace ehc::engram {

struct GatherDequantArgs {
  const uint8_t* weight;  // row r at r*weight_stride, e4m3fn
  const uint8_t* scale;   // row r at r*scale_stride, ue8m0
  int64_t weight_stride;
  int64_t scale_stride;
  int64_t width;       // hd
  int64_t group;       // divides hd
  int64_t columns;     // C
  RowIndices indices;  // -1 or a valid row, checked by the caller
  DType type;          // of the embedding: bf16, f16 or f32
  void* embedding;     // token t at t*token_stride
  int64_t token_stride;
  // Store past the caches where rows allow it; no bit depends on it.
  bool streaming;
};

// Tokens [begin, end), of at least one column.
EHC_CPU_KERNEL(void gather_decode_rows(const GatherDequantArgs& args, int64_t begin, int64_t end));

}  // namespace ehc::engram
