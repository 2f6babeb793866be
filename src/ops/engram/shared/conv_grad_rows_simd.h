// Rows that the convolution's backward pass reads and sums, and the factors folded into them.
#pragma once

#include "ops/engram/conv/conv_simd.h"

namespace ehc::engram::EHC_ISA {
namespace {

// V, or v, with the scale that normalises it, and G.
template <class A>
struct ConvGradSource {
  ConvSource<A> value;
  const A* grad;
  int64_t grad_token_stride, grad_stream_stride;

  EHC_SIMD const A* grad_row(int64_t token, int64_t stream) const {
    return grad + token * grad_token_stride + stream * grad_stream_stride;
  }
};

inline constexpr float kLog2e = 0x1.715476p+0f, kLn2 = 0x1.62e43p-1f;
// What makes g gu of gg'.
inline constexpr float kUnfold = 0x1.ebfbep-2f;  // ln(2)^2

// F, behind the rows of conv_prepare.
EHC_SIMD const float* folded_tap(const PreparedWeights& weights, int64_t k, int64_t stream) {
  return weights.tap(weights.taps + 1 + k, stream);
}

// Sums over the tokens of a chunk and stream: a row for each tap.
struct PartialRows {
  float* data;
  int64_t row;
  EHC_SIMD float* of(int64_t tap) const { return data + tap * row; }
};

}  // namespace
}  // namespace ehc::engram::EHC_ISA
