// Arguments of the post kernels.
#pragma once

#include "backends/cpu/kernel.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

struct PostForwardArgs {
  StreamSizes sizes;
  StreamRows layer_output;  // A[T,d]
  StreamRows residual;      // A[T,n,d]
  Coefficients post;        // F32[T,n]
  Coefficients comb;        // F32[T,n,n]
  StreamRows new_residual;  // A[T,n,d]; may be residual
  // Store past the caches where rows allow it; no bit depends on it. Never in place.
  bool streaming = false;
};

struct PostBackwardArgs {
  StreamSizes sizes;
  GradientRows grad_new_residual;  // [T,n,d]
  StreamRows layer_output;         // A[T,d]
  StreamRows residual;             // A[T,n,d]
  Coefficients post;               // F32[T,n]
  Coefficients comb;               // F32[T,n,n]
  StreamRows grad_layer_output;    // A[T,d]
  StreamRows grad_residual;        // A[T,n,d]
  Coefficients grad_post;          // F32[T,n]
  Coefficients grad_comb;          // F32[T,n,n]
  bool streaming = false;          // as above: grad_layer_output and grad_residual
};

EHC_CPU_KERNEL(void post_fwd_tile(const PostForwardArgs& args, const Tile& tile));
// Tokens [begin, end).
EHC_CPU_KERNEL(void post_bwd_tokens(const PostBackwardArgs& args, int64_t begin, int64_t end));

// The same in plain loops, in double and in float.
template <class Real>
void post_fwd_reference(const PostForwardArgs& args, const Tile& tile);
template <class Real>
void post_bwd_reference(const PostBackwardArgs& args, int64_t begin, int64_t end);

}  // namespace ehc::mhc
