// Indices [T, C] of table rows, I32 or I64; -1 means "no row".
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace ehc::engram {

struct RowIndices {
  bool wide = false;  // I64
  const void* data = nullptr;
  int64_t token_stride = 0;
};

EHC_HD int64_t row_index(const RowIndices& indices, int64_t t, int64_t c) {
  const int64_t at = t * indices.token_stride + c;
  return indices.wide ? static_cast<const int64_t*>(indices.data)[at]
                      : static_cast<const int32_t*>(indices.data)[at];
}

// Walks over (token, column).
struct RowCursor {
  int64_t token, column, columns;

  EHC_HD void advance() {
    if (++column < columns) return;
    column = 0;
    ++token;
  }
};

}  // namespace ehc::engram
