// Arguments of the Sinkhorn kernels.
#pragma once

#include "backends/cpu/kernel.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

enum class SinkhornForm : uint8_t { deepseek, megatron, log };

struct SinkhornRule {
  int64_t streams = 0;  // n
  int64_t repeat = 0;
  float eps = 0;
  SinkhornForm form = SinkhornForm::deepseek;
};

struct SinkhornForwardArgs {
  SinkhornRule rule;
  Coefficients logits;  // F32[T,n,n]
  Coefficients comb;    // F32[T,n,n]
};

struct SinkhornBackwardArgs {
  SinkhornRule rule;
  Coefficients grad_comb;    // F32[T,n,n]
  Coefficients logits;       // F32[T,n,n]
  Coefficients grad_logits;  // F32[T,n,n]
};

// Tokens [begin, end).
EHC_CPU_KERNEL(void sinkhorn_fwd_tokens(const SinkhornForwardArgs& args, int64_t begin,
                                        int64_t end));
EHC_CPU_KERNEL(void sinkhorn_bwd_tokens(const SinkhornBackwardArgs& args, int64_t begin,
                                        int64_t end));

// The same in plain loops, in double and in float.
template <class Real>
void sinkhorn_fwd_reference(const SinkhornForwardArgs& args, int64_t begin, int64_t end);
template <class Real>
void sinkhorn_bwd_reference(const SinkhornBackwardArgs& args, int64_t begin, int64_t end);

}  // namespace ehc::mhc
