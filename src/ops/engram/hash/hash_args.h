// Arguments of the hash kernels, CPU and CUDA.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"

namespace ehc::engram {

struct HashArgs {
  const int32_t* window;       // [T, Nmax]
  const int64_t* multipliers;  // [L, Nmax]
  const int32_t* sizes;        // [L, C]
  const void* offsets;         // [L, C]
  const uint8_t* mask;         // [T], or null
  void* indices;               // element (l, t, c) at l*layer_stride + t*token_stride + c
  int64_t window_stride;
  int64_t layer_stride;
  int64_t token_stride;
  int64_t tokens;
  int64_t layers;
  int64_t heads;
  int32_t orders;  // Nmax - 1
  bool offsets_are_64;
  bool indices_are_64;
};

// Tokens [begin, end) of all layers.
EHC_CPU_KERNEL(void hash_rows(const HashArgs& args, int64_t begin, int64_t end));

}  // namespace ehc::engram
