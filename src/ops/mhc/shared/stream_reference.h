// Access to rows and coefficients, element by element, for the reference loops.
#pragma once

#include "core/float_formats.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

inline int64_t at(const StreamRows& rows, int64_t token, int64_t stream, int64_t column) {
  return token * rows.token_stride + stream * rows.stream_stride + column;
}

inline float load(const StreamSizes& sizes, const StreamRows& rows, int64_t token, int64_t stream,
                  int64_t column) {
  return load_float(rows.data, sizes.activation, at(rows, token, stream, column));
}

// Rounds once.
template <class Real>
void store(const StreamSizes& sizes, const StreamRows& rows, int64_t token, int64_t stream,
           int64_t column, Real x) {
  store_float(rows.data, sizes.activation, at(rows, token, stream, column), x);
}

inline StreamSizes sizes_of(const StreamSizes& sizes, const GradientRows& rows) {
  StreamSizes copy = sizes;
  if (rows.is_f32) copy.activation = DType::f32;
  return copy;
}
inline float load(const StreamSizes& sizes, const GradientRows& from, int64_t token, int64_t stream,
                  int64_t column) {
  return load(sizes_of(sizes, from), from.rows, token - from.first_token, stream, column);
}
template <class Real>
void store(const StreamSizes& sizes, const GradientRows& to, int64_t token, int64_t stream,
           int64_t column, Real x) {
  store(sizes_of(sizes, to), to.rows, token - to.first_token, stream, column, x);
}

inline float load(const Coefficients& from, int64_t token, int64_t row, int64_t column) {
  return from.data[token * from.token_stride + row * from.row_stride + column];
}

template <class Real>
void store(const Coefficients& to, int64_t token, int64_t row, int64_t column, Real x) {
  to.data[token * to.token_stride + row * to.row_stride + column] = static_cast<float>(x);
}

}  // namespace ehc::mhc
