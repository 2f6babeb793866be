// Addressed rows as the items of a CUDA kernel: item t*C + c is column c of token t.
#pragma once

#include "backends/cuda/pack.cuh"
#include "ops/engram/shared/row_indices.h"
#include "ops/engram/shared/table_rows.cuh"

namespace ehc::engram {

// An item finds its index and its place in the embedding. Where both are dense no division is made.
struct RowItems {
  RowIndices indices;
  int64_t items;    // T * C
  int64_t columns;  // C
  int64_t width;    // hd
  int64_t out_token_stride;
  bool is_dense;

  __host__ __device__ __forceinline__ int64_t count() const { return items; }
  __device__ __forceinline__ int64_t index(int64_t item) const {
    if (is_dense) return row_index(indices, 0, item);
    return row_index(indices, item / columns, item % columns);
  }
  __device__ __forceinline__ int64_t out(int64_t item) const {
    if (is_dense) return item * width;
    return item / columns * out_token_stride + item % columns * width;
  }
};

inline RowItems row_items(const RowIndices& indices, int64_t tokens, int64_t columns, int64_t width,
                          int64_t out_token_stride) {
  const bool is_dense =
      tokens == 1 || (indices.token_stride == columns && out_token_stride == columns * width);
  return {indices, tokens * columns, columns, width, out_token_stride, is_dense};
}

// Can the embedding's rows be written `border` bytes at a time?
inline bool are_aligned(const RowItems& items, const void* out, DType type, size_t border = 16) {
  const size_t size = size_of(type);
  return are_aligned(out, items.width, size, border) &&
         (items.is_dense || are_aligned(out, items.out_token_stride, size, border));
}

}  // namespace ehc::engram
