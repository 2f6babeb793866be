// Elements of integer tensors, whatever their width.
#pragma once

#include "ehc/tensor.h"

namespace ehc::cli {

// Element `at` of contiguous I64, I32, U8 or BOOL.
inline int64_t integer_at(const Tensor& t, int64_t at) {
  if (t.dtype == DType::i64) return t.as<int64_t>()[at];
  return t.dtype == DType::i32 ? t.as<int32_t>()[at] : t.as<uint8_t>()[at];
}

}  // namespace ehc::cli
