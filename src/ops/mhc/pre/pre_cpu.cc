// What the backward of a sublayer's entry has of its own, on SIMD lanes.
//
//   y = (c r) w, r = 1 / sqrt(mean c^2 + eps), given g = grad_y:
//   grad_c = r (g w) - c (r^3 sum(g w c) / d)    grad_w = sum over tokens of (c r) g
//   grad_pre_i = sum over d of grad_o x_i
//   c, g A[T,d]; w W[d]; grad_c, grad_o A or F32[T,d]; x A[T,n,d]; grad_w F32[d]; grad_pre F32[T,n]
//
// Bytes a token in 16-bit types: the norm 6d, grad_pre (2n+2)d.
// Algorithm: lanes are columns. The norm takes its sums, then writes; grad_pre keeps n sums in
// registers.
// Class R: lanes of a sum depend on the column alone, sums over tokens ascend within a chunk that
// the caller fixes. Tokens are independent else.
#include "ops/mhc/pre/pre_args.h"
#include "ops/mhc/shared/rms_math.h"
#include "ops/mhc/shared/stream_rows_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

using simd::kPair;
using simd::Pair;
using simd::Vec;

template <class A, class W>
inline void layer_norm_backward(const LayerNormBackwardArgs& a, int64_t begin, int64_t end,
                                float* grad_weight) {
  const int64_t d = a.sizes.hidden;
  for (int64_t c = 0; c < d; c += kPair) {
    simd::store_some(grad_weight + c, simd::zero_pair(), d - c, false);
  }
  for (int64_t t = begin; t < end; ++t) {
    const A* row = token_row<const A>(a.rows, t);
    const A* grad = token_row<const A>(a.grad, t);
    Pair product = simd::zero_pair();
    for (int64_t c = 0; c < d; c += kPair) {
      const Pair g = mul(simd::load_some(grad + c, d - c), load_weight<A, W>(a.weight, c, d - c));
      product = fma(g, simd::load_some(row + c, d - c), product);
    }
    const float factor = rms_factor({d, a.eps, false}, simd::square_sum(row, d));
    const float slope = reduce_add(product) * factor * factor * factor / static_cast<float>(d);
    const Vec r = simd::splat(factor), s = simd::splat(-slope);
    for (int64_t c = 0; c < d; c += kPair) {
      const Pair x = simd::load_some(row + c, d - c), g = simd::load_some(grad + c, d - c);
      const Pair of_norm = mul(mul(g, load_weight<A, W>(a.weight, c, d - c)), r);
      store_gradient<A>(a.grad_rows, t, 0, c, fma(s, x, of_norm), d - c, false);
      const Pair sum = simd::load_f32_some<A>(grad_weight + c, d - c);
      simd::store_some(grad_weight + c, simd::natural_order<A>(fma(mul(x, r), g, sum)), d - c,
                       false);
    }
  }
}

template <class A, int kStreams>
inline void grad_pre(const GradPreArgs& a, int64_t begin, int64_t end) {
  const int64_t streams = count_of<kStreams>(a.sizes.streams), d = a.sizes.hidden;
  for (int64_t t = begin; t < end; ++t) {
    const auto rows = token_rows<const A>(a.residual, t);
    const auto soon = token_rows<const A>(a.residual, t + 1 < end ? t + 1 : t);
    Pair sums[kStreams == 0 ? kMaxStreams : kStreams];
    for (int64_t i = 0; i < streams; ++i) sums[i] = simd::zero_pair();
    for (int64_t c = 0; c < d; c += kPair) {
      const Pair grad = load_gradient<A>(a.grad_row, t, 0, c, d - c);
      for (int64_t i = 0; i < streams; ++i) {
        simd::prefetch(soon[i] + c);
        sums[i] = fma(grad, simd::load_some(rows[i] + c, d - c), sums[i]);
      }
    }
    float* to = a.grad_pre.data + t * a.grad_pre.token_stride;
    for (int64_t i = 0; i < streams; ++i) to[i] = reduce_add(sums[i]);
  }
}

}  // namespace

void layer_norm_bwd_tokens(const LayerNormBackwardArgs& a, int64_t begin, int64_t end,
                           float* grad_weight) {
  simd::with_activation(a.sizes.activation, [&](auto activation) {
    using A = decltype(activation);
    if (a.weight_type == DType::f32) {
      return layer_norm_backward<A, float>(a, begin, end, grad_weight);
    }
    layer_norm_backward<A, simd::Bf16>(a, begin, end, grad_weight);
  });
}

void grad_pre_tokens(const GradPreArgs& a, int64_t begin, int64_t end) {
  with_kernel(a.sizes, [&](auto activation, auto streams) {
    grad_pre<decltype(activation), decltype(streams)::value>(a, begin, end);
  });
}

}  // namespace ehc::mhc::EHC_ISA
