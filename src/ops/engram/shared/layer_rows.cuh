// The last step of the whole layer on a pack, shared by its kernels: same function, same bits.
#pragma once

#include "ops/engram/shared/row_packs.cuh"
#include "ops/engram/shared/silu.cuh"

namespace ehc::engram {

// round(x + alpha*v + silu(c)), or with `kTwice` round(round(x + alpha*v) + silu(c))
template <class A, bool kTwice>
__device__ __forceinline__ Pack layer_pack(float alpha, const Pack& v, const Pack& x,
                                           const float (&c)[kWidth<A>]) {
  const auto sum = [&](int k) { return fmaf(alpha, column<A>(v, k), column<A>(x, k)); };
  if constexpr (kTwice) {
    const Pack once = cuda::make_pack<A>(sum);
    return cuda::make_pack<A>([&](int k) { return column<A>(once, k) + fast_silu(c[k]); });
  } else {
    return cuda::make_pack<A>([&](int k) { return sum(k) + fast_silu(c[k]); });
  }
}

}  // namespace ehc::engram
