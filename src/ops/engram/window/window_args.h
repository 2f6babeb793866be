// Arguments of the window kernels, CPU and CUDA.
#pragma once

#include <cstdint>

namespace ehc::engram {

struct WindowArgs {
  const int32_t* ids;         // [T]
  const int32_t* cu_seqlens;  // [B+1], or null: one sequence
  const int32_t* history;     // [B, Nmax-1], or null
  const uint8_t* mask;        // [T], or null
  int32_t* window;            // row t at t*window_stride
  int64_t window_stride;
  int64_t tokens;
  int64_t sequences;
  int32_t max_ngram;
  int32_t pad_id;
  int32_t reset_id;  // -1: none
  bool farther;      // a blocked slot blocks all farther ones
};

}  // namespace ehc::engram
