// The gate's statistics on CUDA for operators that were not given them: by the kernel that saves
// them, so with the same bits.
#pragma once

#include "core/workspace.h"
#include "ops/engram/gate/gate_args.h"

namespace ehc::engram {

void gate_fwd_cuda(const GateForwardArgs& args, int device, void* stream);

// F32[T,n] each.
struct GateStatistics {
  StreamStatistic dot, alpha, rstd_residual, rstd_key;
};

inline GateStatistics take_statistics(Workspace& workspace, int64_t tokens, int64_t streams) {
  const auto take = [&] {
    return StreamStatistic{workspace.take<float>(tokens * streams), streams};
  };
  return {take(), take(), take(), take()};
}

// Computes them and makes them those of `gate`.
inline void compute_statistics(const GateStatistics& statistics, GateForwardArgs& gate, int device,
                               void* stream) {
  gate.dot = statistics.dot;
  gate.alpha = statistics.alpha;
  gate.rstd_residual = statistics.rstd_residual;
  gate.rstd_key = statistics.rstd_key;
  GateForwardArgs forward = gate;
  forward.mode = GateMode::stats;
  gate_fwd_cuda(forward, device, stream);
}

}  // namespace ehc::engram
