// The projection of streams that are all one row: fn summed over them, in F32.
#include <algorithm>

#include "ops/mhc/seam/seam_args.h"

namespace ehc::mhc {

void fn_sum_rows(const FnSumArgs& a, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; ++j) {
    const float* fn = a.fn.data + j * a.fn.stride;
    float* sum = a.sum.data + j * a.sum.stride;
    std::copy_n(fn, a.hidden, sum);
    for (int64_t i = 1; i < a.streams; ++i) {
      for (int64_t c = 0; c < a.hidden; ++c) sum[c] += fn[i * a.hidden + c];
    }
  }
}

}  // namespace ehc::mhc
