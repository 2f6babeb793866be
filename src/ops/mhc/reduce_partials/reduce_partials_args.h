// Arguments of the reduce_partials kernels.
#pragma once

#include "backends/cpu/kernel.h"
#include "ops/mhc/shared/rms_math.h"

namespace ehc::mhc {

// F32[S,T,G,M] or F32[S,T,G], without S a split stride of 0, without G a group stride of 0. Inputs
// are only read.
struct GroupRows {
  float* data = nullptr;
  int64_t split_stride = 0, token_stride = 0, group_stride = 0;
};

struct ReducePartialsForwardArgs {
  int64_t splits = 0, groups = 1, mixes = 0;  // S, G, M
  Rms rms;                                    // of one group
  GroupRows mul_partial, sqr_partial;
  GroupRows mixed;     // F32[T,M]
  GroupRows mul, sqr;  // without S; null data: not wanted
};

struct ReducePartialsBackwardArgs {
  int64_t groups = 1, mixes = 0;
  Rms rms;
  GroupRows grad_mixed;          // F32[T,M]
  GroupRows mul, sqr;            // without S
  GroupRows grad_mul, grad_sqr;  // without S
};

// Tokens [begin, end).
EHC_CPU_KERNEL(void reduce_partials_fwd_tokens(const ReducePartialsForwardArgs& args, int64_t begin,
                                               int64_t end));
EHC_CPU_KERNEL(void reduce_partials_bwd_tokens(const ReducePartialsBackwardArgs& args,
                                               int64_t begin, int64_t end));

// The same in plain loops, in double and in float.
template <class Real>
void reduce_partials_fwd_reference(const ReducePartialsForwardArgs& args, int64_t begin,
                                   int64_t end);
template <class Real>
void reduce_partials_bwd_reference(const ReducePartialsBackwardArgs& args, int64_t begin,
                                   int64_t end);

}  // namespace ehc::mhc
