// Elements of integer tensors, whatever their width.
#pragma once

#include "core/schema.h"
#include "ehc/tensor.h"

namespace ehc::cli {

// Element `at` of contiguous I64, I32, U8 or BOOL.
inline int64_t integer_at(const Tensor& t, int64_t at) {
  if (t.dtype == DType::i64) return t.as<int64_t>()[at];
  return t.dtype == DType::i32 ? t.as<int32_t>()[at] : t.as<uint8_t>()[at];
}

// Outputs whose first axis is U have room for all rows that there may be. Cuts `output` to those
// that there are: up to the first -1 of unique_rows, which comes first in the table and sets
// `rows`.
inline void cut_to_unique_rows(const TensorSpec& spec, Tensor& output, int64_t& rows) {
  const Expression first = spec.shape.rank > 0 ? spec.shape.dims[0] : Expression{};
  if (!first.is_symbol() || first.steps[0].value != symbol("U")) return;
  if (spec.name == "unique_rows") {
    rows = 0;
    while (rows < output.numel() && integer_at(output, rows) >= 0) ++rows;
  }
  output.shape[0] = rows;
}

}  // namespace ehc::cli
