// Sums of a projection as the kernels see them.
#pragma once

#include <cstdint>

namespace ehc::mhc {

// F32[S,T,G,M] or F32[S,T,G]; without S the split stride is 0, without G the group stride. Inputs
// are only read.
struct GroupRows {
  float* data = nullptr;
  int64_t split_stride = 0, token_stride = 0, group_stride = 0;
};

}  // namespace ehc::mhc
