// BF16 weights of the short convolution in the registers of a thread that goes along its chains.
#pragma once

#include "ops/engram/shared/conv_rows.cuh"

namespace ehc::engram {

// Weights of a pack of columns, as they came: rows in packs of 16 bytes, taps side by side.
struct PackedChainWeights {
  Pack taps[kChainTaps];  // of two columns each
  Pack norms;

  __device__ __forceinline__ void load(const ShortConv& conv, int64_t h, int64_t first) {
    norms = cuda::load_pack<true>(static_cast<const cuda::Bf16*>(conv.norm_weight) +
                                      h * conv.norm_weight_stream_stride + first,
                                  kWidth<cuda::Bf16>);
    const cuda::Bf16* from = static_cast<const cuda::Bf16*>(conv.conv_weight) +
                             h * conv.conv_weight_stream_stride + first * kChainTaps;
#pragma unroll
    for (int q = 0; q < kChainTaps; ++q) {
      taps[q] = cuda::load_pack<true>(from + q * kWidth<cuda::Bf16>, kWidth<cuda::Bf16>);
    }
  }
};

// The same as floats, two columns at a time.
struct WideChainWeights {
  float tap[kChainTaps][kWidth<cuda::Bf16>];
  float norm[kWidth<cuda::Bf16>];

  __device__ __forceinline__ void widen(const PackedChainWeights& w, int q) {
#pragma unroll
    for (int i = 2 * q; i < 2 * q + 2; ++i) {
      norm[i] = column<cuda::Bf16>(w.norms, i);
#pragma unroll
      for (int k = 0; k < kChainTaps; ++k) {
        tap[k][i] = column<cuda::Bf16>(w.taps[q], i % 2 * kChainTaps + k);
      }
    }
  }
};

}  // namespace ehc::engram
