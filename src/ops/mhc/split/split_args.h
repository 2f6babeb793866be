// Arguments of the split kernels.
#pragma once

#include "backends/cpu/kernel.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

struct SplitForwardArgs {
  int64_t streams = 0;           // n
  Coefficients mixes;            // F32[T,N], N = n*n + 2n
  const float* scale = nullptr;  // F32[3]
  const float* base = nullptr;   // F32[N]
  float pre_eps = 0, post_mult = 0;
  Coefficients pre, post;    // F32[T,n]
  Coefficients comb_logits;  // F32[T,n,n]
};

struct SplitBackwardArgs {
  int64_t streams = 0;
  Coefficients grad_pre, grad_post;  // F32[T,n]
  Coefficients grad_comb_logits;     // F32[T,n,n]
  Coefficients mixes;                // F32[T,N]
  const float* scale = nullptr;
  const float* base = nullptr;
  float post_mult = 0;
  Coefficients grad_mixes;  // F32[T,N]
};

// The partial sums of one chunk of tokens.
struct SplitPartial {
  float* scale = nullptr;  // F32[3]
  float* base = nullptr;   // F32[N]
};

// The partial sums of all chunks, on a device.
struct SplitPartials {
  float* scale = nullptr;  // F32[P,3]
  float* base = nullptr;   // F32[P,N]
  int64_t scale_stride = 0, base_stride = 0;
};

// A sum of partials F32[P,width] to be added to a target.
struct PartialSum {
  int64_t partials = 0, width = 0;
  const float* partial = nullptr;  // null when P is 0
  int64_t partial_stride = 0;
  const float* accumulated = nullptr;  // F32[width], or null: zeros
  float* sum = nullptr;                // F32[width]; may be `accumulated`
};

// Tokens [begin, end).
EHC_CPU_KERNEL(void split_fwd_tokens(const SplitForwardArgs& args, int64_t begin, int64_t end));
// Tokens [begin, end), which are one chunk.
EHC_CPU_KERNEL(void split_bwd_chunk(const SplitBackwardArgs& args, const SplitPartial& partial,
                                    int64_t begin, int64_t end));
EHC_CPU_KERNEL(void add_partials(const PartialSum& sum));

// The same in plain loops, in double and in float.
template <class Real>
void split_fwd_reference(const SplitForwardArgs& args, int64_t begin, int64_t end);
template <class Real>
void split_bwd_reference(const SplitBackwardArgs& args, const SplitPartial& partial, int64_t begin,
                         int64_t end);
template <class Real>
void add_partials_reference(const PartialSum& sum);

}  // namespace ehc::mhc
