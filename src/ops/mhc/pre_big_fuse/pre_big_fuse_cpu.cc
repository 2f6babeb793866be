// The norm of mhc.pre_big_fuse on SIMD lanes; its other steps are the kernels of the operators that
// it stands for.
//
//   y = round((c r) w), r = 1 / sqrt(mean c^2 + eps); c A[T,d], w W[d], y A[T,d]
//
// Bytes a token in 16-bit types: 2d; the row has just been written to a cache.
// Algorithm: lanes are columns, two passes over the row.
// Class R: lanes of the sum depend on the column alone. Tokens are independent.
#include "ops/mhc/pre_big_fuse/pre_big_fuse_args.h"
#include "ops/mhc/shared/rms_math.h"
#include "ops/mhc/shared/stream_rows_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

using simd::kPair;
using simd::Pair;

template <class A, class W>
inline void normalise(const LayerNormArgs& a, int64_t begin, int64_t end) {
  const int64_t d = a.sizes.hidden;
  const bool streaming = a.streaming && can_stream<A>(a.out);
  for (int64_t t = begin; t < end; ++t) {
    const A* row = token_row<const A>(a.rows, t);
    A* out = token_row<A>(a.out, t);
    const Rms rms = {d, a.eps, false};
    const simd::Vec factor = simd::splat(rms_factor(rms, simd::square_sum(row, d)));
    for (int64_t c = 0; c < d; c += kPair) {
      const Pair x = mul(simd::load_some(row + c, d - c), factor);
      simd::store_some(out + c, mul(x, load_weight<A, W>(a.weight, c, d - c)), d - c, streaming);
    }
  }
  if (streaming) simd::stream_fence();
}

}  // namespace

void layer_norm_rows(const LayerNormArgs& a, int64_t begin, int64_t end) {
  simd::with_activation(a.sizes.activation, [&](auto activation) {
    using A = decltype(activation);
    if (a.weight_type == DType::f32) return normalise<A, float>(a, begin, end);
    normalise<A, simd::Bf16>(a, begin, end);
  });
}

}  // namespace ehc::mhc::EHC_ISA
