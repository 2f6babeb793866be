// The last step of the whole layer on a pack, shared by its kernels: same function, same bits.
#pragma once

#include "ops/engram/shared/row_packs.cuh"
#include "ops/engram/shared/silu.cuh"

namespace ehc::engram {

// round(x + alpha*v + silu(c)), or with `kTwice` round(round(x + alpha*v) + silu(c)), of the
// columns of word w.
template <class A, bool kTwice>
__device__ __forceinline__ uint32_t layer_word(float alpha, const Pack& v, const Pack& x,
                                               const float (&c)[kWidth<A>], int w) {
  const auto sum = [&](int k) { return fmaf(alpha, column<A>(v, k), column<A>(x, k)); };
  if constexpr (sizeof(A) == 4) {
    return __float_as_uint(sum(w) + fast_silu(c[w]));
  } else {
    const int k = 2 * w;
    float low = sum(k);
    float high = sum(k + 1);
    if constexpr (kTwice) {
      const Pack once{{cuda::round_two<A>(low, high)}};
      low = column<A>(once, 0);
      high = column<A>(once, 1);
    }
    return cuda::round_two<A>(low + fast_silu(c[k]), high + fast_silu(c[k + 1]));
  }
}

template <class A, bool kTwice>
__device__ __forceinline__ Pack layer_pack(float alpha, const Pack& v, const Pack& x,
                                           const float (&c)[kWidth<A>]) {
  Pack pack;
#pragma unroll
  for (int w = 0; w < 4; ++w) pack.word[w] = layer_word<A, kTwice>(alpha, v, x, c, w);
  return pack;
}

}  // namespace ehc::engram
