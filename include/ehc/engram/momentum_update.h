// engram.momentum_update: the moving average of a table's gradient, and the update that it
// proposes.
#pragma once

#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// Per element, in fp32, with g = grad, m = momentum, and 1 - beta formed in double and rounded
// once:
//   m' = fma(m, beta, round((1 - beta) * g))
//   update = fma(g, 1 - beta, round(beta * m'))      nesterov
//            m'                                      otherwise
//   new_momentum = round(m')
// The update is made from the m' before it is rounded to the type of the momentum.
//
// grad and momentum are BF16 or F32, each of its own type. Row strides are free; no bit depends on
// them. new_momentum may be the very same view as momentum (in place), all else must be apart.
// Exact: the same bits everywhere. Bytes per element: grad + 2 * momentum + 4. Contract 1.12a.
struct MomentumUpdate {
  Tensor grad{};                   // BF16 or F32[rows, hd]
  Tensor momentum{};               // BF16 or F32[rows, hd]
  Tensor update{};                 // out: F32[rows, hd]
  Tensor new_momentum{};           // out: as momentum
  std::optional<double> beta{};    // 0..1, required
  std::optional<bool> nesterov{};  // required
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void momentum_update(Context& context, const MomentumUpdate& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const MomentumUpdate& params);

}  // namespace ehc::engram
