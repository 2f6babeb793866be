// What arguments of the mHC kernels consist of: rows of streams, coefficients of tokens, and the
// part of a call that one kernel call does.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "ehc/dtype.h"

namespace ehc::mhc {

inline constexpr int kMaxStreams = 8;

// Calls body(i) for every stream in ascending order. Unrolled on a device: what is indexed by a
// constant alone stays in registers.
template <class Body>
EHC_HD void each_stream(int64_t streams, const Body& body) {
#if defined(__CUDA_ARCH__)
#pragma unroll
  for (int i = 0; i < kMaxStreams; ++i) {
    if (i < streams) body(i);
  }
#else
  for (int64_t i = 0; i < streams; ++i) body(i);
#endif
}

// Rows A[T,n,d], or A[T,d] with a stream stride of 0. Inputs are only read.
struct StreamRows {
  void* data = nullptr;
  int64_t token_stride = 0, stream_stride = 0;
};

// Rows of A, or of F32 whatever A is: gradients that are not rounded yet. Of a block of tokens the
// first row is that of `first_token`.
struct GradientRows {
  StreamRows rows;
  bool is_f32 = false;
  int64_t first_token = 0;
};

// Coefficients F32[T,n], or F32[T,n,n] whose first stream is the row. Inputs are only read.
struct Coefficients {
  float* data = nullptr;
  int64_t token_stride = 0, row_stride = 0;
};

// Rows F32[M,K] of a projection: row j times a token's flattened streams is mix j. Inputs are only
// read.
struct MixRows {
  float* data = nullptr;
  int64_t stride = 0;
};

// The sizes of a call.
struct StreamSizes {
  int64_t tokens = 0;              // T
  int64_t streams = 0;             // n
  int64_t hidden = 0;              // d
  DType activation = DType::none;  // A: bf16, f16 or f32
};

// Tokens [token_begin, token_end), of them columns [column_begin, column_end).
struct Tile {
  int64_t token_begin, token_end;
  int64_t column_begin, column_end;
};

}  // namespace ehc::mhc
