// Arguments of the reduce_partials kernels.
#pragma once

#include "backends/cpu/kernel.h"
#include "ops/mhc/shared/group_rows.h"
#include "ops/mhc/shared/rms_math.h"

namespace ehc::mhc {

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
