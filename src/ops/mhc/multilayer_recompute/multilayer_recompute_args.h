// Arguments of the recompute kernel.
#pragma once

#include "backends/cpu/kernel.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

struct RecomputeLayer {
  Coefficients pre;        // F32[T,n]
  StreamRows layer_input;  // A[T,d]
  // A last layer may have no post, and nothing of what follows.
  bool has_post = false;
  StreamRows layer_output;  // A[T,d]
  Coefficients post;        // F32[T,n]
  Coefficients comb;        // F32[T,n,n]
  StreamRows new_residual;  // A[T,n,d]
};

// Layers of a call; more take further calls.
inline constexpr size_t kRecomputedTogether = 64;

struct RecomputeArgs {
  StreamSizes sizes;
  StreamRows residual;  // A[T,n,d]
  const RecomputeLayer* layers = nullptr;
  int64_t layer_count = 0;
  // Store past the caches where rows allow it; no bit depends on it.
  bool streaming = false;
};

EHC_CPU_KERNEL(void recompute_tile(const RecomputeArgs& args, const Tile& tile));

}  // namespace ehc::mhc
