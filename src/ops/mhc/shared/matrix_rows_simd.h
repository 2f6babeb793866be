// Matrices of tokens with their n*n elements side by side.
#pragma once

#include "ops/mhc/shared/stream_rows_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

// Room for a matrix in whole pairs of vectors.
inline constexpr int64_t kMatrixRoom =
    (kMaxStreams * kMaxStreams + simd::kPair - 1) / simd::kPair * simd::kPair;

EHC_SIMD bool is_packed(const Coefficients& rows, int64_t streams) {
  return rows.row_stride == streams || streams == 1;
}

// The matrix of a token, in place or copied to `room`.
EHC_SIMD const float* packed_matrix(const Coefficients& rows, int64_t token, int64_t streams,
                                    float* room) {
  const float* first = token_values(rows, token);
  if (is_packed(rows, streams)) return first;
  for (int64_t i = 0; i < streams; ++i) {
    for (int64_t o = 0; o < streams; ++o) room[i * streams + o] = first[i * rows.row_stride + o];
  }
  return room;
}

// Puts a packed matrix where rows lie apart.
EHC_SIMD void unpack_matrix(const Coefficients& rows, int64_t token, int64_t streams,
                            const float* packed) {
  float* first = token_values(rows, token);
  for (int64_t i = 0; i < streams; ++i) {
    for (int64_t o = 0; o < streams; ++o) first[i * rows.row_stride + o] = packed[i * streams + o];
  }
}

}  // namespace
}  // namespace ehc::mhc::EHC_ISA
