// Arguments of the projection's backward kernels.
#pragma once

#include "backends/cpu/kernel.h"
#include "core/host_device.h"
#include "ops/mhc/shared/group_rows.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

struct NormFnBackwardArgs {
  StreamSizes sizes;
  int64_t mixes = 0;             // M
  int64_t groups = 1;            // G, divides n*d
  GroupRows grad_mul, grad_sqr;  // F32[T,G,M], F32[T,G]
  StreamRows residual;           // A[T,n,d]
  MixRows fn;                    // F32[M,n*d]
  bool tf32 = false;             // fn is rounded
  StreamRows grad_residual_acc;  // A[T,n*targets,d]; null data: zeros
  MixRows grad_fn_acc;           // F32[M,n*d]; null data: zeros
  // Outputs, in composites one alone: null data is not made.
  GradientRows grad_residual;  // [T,n,d]; may be grad_residual_acc
  MixRows grad_fn;             // F32[M,n*d]; may be grad_fn_acc
  // Store grad_residual past the caches where rows allow it; no bit depends on it. Never in place.
  bool streaming = false;
  // What only composites have. Streams of grad_residual_acc that are added for one of the residual:
  int64_t targets = 1;
  // and a row A or F32[T,d], times factors F32[T,n], that is added to them. Null data: none.
  GradientRows grad_row{};
  Coefficients row_factor{};
  // is what both make rounded to A, as an operator before this one would leave it?
  bool rounds_target = false;
};

// Tokens whose products are added before they meet the sum of those before.
inline constexpr int64_t kNormFnTokens = 48;
// Columns of which fn and its gradient are kept at hand: a page of 16-bit values, so that a page of
// a row is looked up once.
inline constexpr int64_t kNormFnColumns = 2048;
// Columns that a kernel takes at a time.
inline constexpr int64_t kNormFnStrip = 64;

// Floats of scratch of one kernel call: fn and its gradient, a strip of the streams, the gradients
// of the mixes of as many tokens.
EHC_HD int64_t norm_fn_scratch_floats(int64_t mixes) {
  return 2 * mixes * kNormFnColumns + kNormFnTokens * kNormFnStrip + kNormFnTokens * mixes;
}

// Columns of n*d; all tokens where grad_fn is made.
EHC_CPU_KERNEL(void norm_fn_bwd_tile(const NormFnBackwardArgs& args, const Tile& tile,
                                     float* scratch));

// The same in plain loops, in double and in float; without scratch.
template <class Real>
void norm_fn_bwd_reference(const NormFnBackwardArgs& args, const Tile& tile, float* scratch);

}  // namespace ehc::mhc
