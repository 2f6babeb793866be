// mhc.prenorm_gemm in plain loops, in double and in float.
#include <algorithm>
#include <cmath>

#include "ops/mhc/prenorm_gemm/prenorm_gemm_args.h"
#include "ops/mhc/shared/stream_reference.h"

namespace ehc::mhc {

template <class Real>
void prenorm_gemm_reference(const PrenormGemmArgs& a, int64_t split, int64_t begin, int64_t end,
                            float* /*scratch*/) {
  const Columns of_split = columns_of_split(a, split);
  const int64_t d = a.sizes.hidden;
  const int64_t width = a.sizes.streams * d / a.groups;
  for (int64_t t = begin; t < end; ++t) {
    const auto x = [&](int64_t k) -> Real { return load(a.sizes, a.residual, t, k / d, k % d); };
    for (int64_t g = 0; g < a.groups; ++g) {
      const int64_t first = std::max(of_split.begin, g * width);
      const int64_t last = std::min(of_split.end, (g + 1) * width);
      const int64_t at = split * a.mul_partial.split_stride + t * a.mul_partial.token_stride +
                         g * a.mul_partial.group_stride;
      for (int64_t j = 0; j < a.mixes; ++j) {
        Real sum = 0;
        for (int64_t k = first; k < last; ++k) {
          const float fn = a.fn.data[j * a.fn.stride + k];
          sum = std::fma(x(k), static_cast<Real>(a.tf32 ? round_to_tf32(fn) : fn), sum);
        }
        a.mul_partial.data[at + j] = static_cast<float>(sum);
      }
      Real squares = 0;
      for (int64_t k = first; k < last; ++k) squares = std::fma(x(k), x(k), squares);
      a.sqr_partial.data[split * a.sqr_partial.split_stride + t * a.sqr_partial.token_stride +
                         g * a.sqr_partial.group_stride] = static_cast<float>(squares);
    }
  }
}

template void prenorm_gemm_reference<double>(const PrenormGemmArgs&, int64_t, int64_t, int64_t,
                                             float*);
template void prenorm_gemm_reference<float>(const PrenormGemmArgs&, int64_t, int64_t, int64_t,
                                            float*);

}  // namespace ehc::mhc
