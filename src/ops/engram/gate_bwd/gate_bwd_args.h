// Arguments of the gate's backward kernels.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"
#include "core/host_device.h"
#include "ops/engram/gate/gate_args.h"

namespace ehc::engram {

// Rows [T,n,d] of activations, or [T,d] with a stream stride of 0.
struct GradientRows {
  void* data = nullptr;
  int64_t token_stride = 0, stream_stride = 0;
};

struct GateBackwardArgs {
  // What the forward read. dot, alpha, rstd_residual, rstd_key: its statistics, or absent.
  GateForwardArgs gate;
  GradientRows grad_out;           // A[T,n,d], only read
  GradientRows grad_value_path;    // A[T,n,d], only read; may be grad_out
  bool value_path_is_f32 = false;  // then F32[T,n,d]; CUDA alone knows it
  GradientRows grad_residual;      // A[T,n,d]
  GradientRows grad_key;           // A[T,n,d]
  GradientRows grad_value;         // A[T,d]
  // Past the caches, as in the forward: grad_residual and grad_key.
  bool streaming = false;
};

// The sum of a chunk: F32[n,d].
struct GradWeightRows {
  float* data = nullptr;
  int64_t stream_stride = 0;
};

// Of all chunks: F32[P,n,d].
struct GradWeightPartials {
  float* data = nullptr;
  int64_t chunk_stride = 0, stream_stride = 0;
  // F32[T,n,d] of workspace for calls of few tokens, which are not worth a walk over a chunk.
  float* by_token = nullptr;
};

// Floats of GradWeightPartials::by_token; none: it is not used.
EHC_HD int64_t gate_bwd_token_floats(int64_t tokens, int64_t streams, int64_t hidden) {
  return tokens <= 128 ? tokens * streams * hidden : 0;
}

// Tokens [begin, end), one chunk: their gradients, and their sum in `grad_weight`.
EHC_CPU_KERNEL(void gate_bwd_chunk(const GateBackwardArgs& args, int64_t begin, int64_t end,
                                   const GradWeightRows& grad_weight));

}  // namespace ehc::engram
