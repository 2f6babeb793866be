// Arguments of the gather kernel.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"
#include "ehc/dtype.h"
#include "ops/engram/shared/row_indices.h"

namespace ehc::engram {

struct GatherForwardArgs {
  int64_t tokens = 0;              // T
  int64_t columns = 0;             // C, rows fetched per token
  int64_t width = 0;               // hd
  DType table_type = DType::none;  // bf16, f16 or f32
  const void* table = nullptr;     // [rows,hd]
  int64_t table_row_stride = 0;
  RowIndices indices;            // [T,C]; -1 or a valid row, checked by the caller
  DType out_type = DType::none;  // bf16, f16 or f32
  void* out = nullptr;           // [T, C*hd]
  int64_t out_token_stride = 0;
  // Store past the caches where rows allow it; no bit depends on it.
  bool streaming = false;
};

// Tokens [begin, end), of at least one column.
EHC_CPU_KERNEL(void gather_fwd_rows(const GatherForwardArgs& args, int64_t begin, int64_t end));

}  // namespace ehc::engram
