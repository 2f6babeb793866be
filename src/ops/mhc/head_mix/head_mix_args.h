// Arguments of the head_mix kernels.
#pragma once

#include "backends/cpu/kernel.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

struct HeadMixForwardArgs {
  int64_t streams = 0;           // n
  Coefficients mixes;            // F32[T,n]
  const float* scale = nullptr;  // F32[1]
  const float* base = nullptr;   // F32[n]
  float pre_eps = 0;
  Coefficients pre;  // F32[T,n]
};

struct HeadMixBackwardArgs {
  int64_t streams = 0;
  Coefficients grad_pre, mixes;  // F32[T,n]
  const float* scale = nullptr;
  const float* base = nullptr;
  Coefficients grad_mixes;  // F32[T,n]
};

// Tokens [begin, end).
EHC_CPU_KERNEL(void head_mix_fwd_tokens(const HeadMixForwardArgs& args, int64_t begin,
                                        int64_t end));
// Tokens [begin, end), which are one chunk: their sums go to scale F32[1] and base F32[n].
EHC_CPU_KERNEL(void head_mix_bwd_chunk(const HeadMixBackwardArgs& args, int64_t begin, int64_t end,
                                       float* scale, float* base));

// The same in plain loops, in double and in float.
template <class Real>
void head_mix_fwd_reference(const HeadMixForwardArgs& args, int64_t begin, int64_t end);
template <class Real>
void head_mix_bwd_reference(const HeadMixBackwardArgs& args, int64_t begin, int64_t end,
                            float* scale, float* base);

}  // namespace ehc::mhc
