// The rule of operators that take indices of table rows.
#pragma once

#include <string>

#include "core/bind.h"
#include "ops/engram/shared/row_indices.h"

namespace ehc::engram {

inline RowIndices row_indices_of(const Tensor& indices) {
  return {
      .wide = indices.dtype == DType::i64, .data = indices.data, .token_stride = indices.stride[0]};
}

// Every index is -1 or a row of the table.
inline void check_row_indices(const Schema& schema, const Bound& b, const Tensor& tensor) {
  if (tensor.device != Device::cpu) return;
  const RowIndices indices = row_indices_of(tensor);
  for (int64_t t = 0; t < b["T"]; ++t) {
    for (int64_t c = 0; c < b["C"]; ++c) {
      const int64_t index = row_index(indices, t, c);
      if (index >= -1 && index < b["rows"]) continue;
      fail_tensor(schema, "indices", "-1 or a row below " + std::to_string(b["rows"]),
                  std::to_string(index) + " at position [" + std::to_string(t) + "," +
                      std::to_string(c) + "]");
    }
  }
}

}  // namespace ehc::engram
