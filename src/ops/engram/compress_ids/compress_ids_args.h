// Arguments of the id compression, CPU and CUDA.
#pragma once

#include <cstdint>

namespace ehc::engram {

struct CompressIdsArgs {
  const void* ids;       // [T]
  const int32_t* table;  // [V]
  int32_t* compressed;   // [T]
  int64_t tokens;
  int64_t vocab;
  bool ids_are_64;
};

}  // namespace ehc::engram
