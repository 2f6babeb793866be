// Arguments of the expand kernels. The backward pass has none of its own: it is pre_apply with a
// coefficient of 1 for every stream.
#pragma once

#include "backends/cpu/kernel.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

struct ExpandForwardArgs {
  StreamSizes sizes;
  StreamRows hidden;    // A[T,d]
  StreamRows residual;  // A[T,n,d]
  // Store past the caches where rows allow it; no bit depends on it.
  bool streaming = false;
};

EHC_CPU_KERNEL(void expand_fwd_tile(const ExpandForwardArgs& args, const Tile& tile));

// The same as a copy.
void expand_fwd_reference(const ExpandForwardArgs& args, const Tile& tile);

}  // namespace ehc::mhc
