// The steps of the sinkhorn iteration on CUDA, for its operators and the whole optimizer step.
#pragma once

#include "ops/engram/sinkhorn/sinkhorn_args.h"

namespace ehc::engram {

// Wider rows are not held in registers.
inline constexpr int64_t kMostHeldWidth = 8192;

// sinkhorn_step, but for its col_partial: `parts` [chunks * kSinkhornParts, hd] are what its rows
// are added from. `finite`, on the device, says whether rows of scale 0 need not be read; null:
// they are. Rows wider than kMostHeldWidth want a.row_norm.
void sinkhorn_parts_cuda(const char* name, const SinkhornStepArgs& a, int64_t rows,
                         const int* finite, float* parts, int device, void* stream);

// sinkhorn_step_reduce, where each of a.partials is the sum of `parts` rows of a.col_partial.
void sinkhorn_reduce_cuda(const char* name, const SinkhornReduceArgs& a, int64_t width,
                          int64_t parts, int device, void* stream);

}  // namespace ehc::engram
