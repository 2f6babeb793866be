// engram.fused_weight: the product of the gate's two norm weights.
#pragma once

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// weight_fused = weight_hidden * weight_embed, elementwise, one rounding to F32: exact for BF16
// inputs, the same bits everywhere. Make it again only when a weight changes. Row strides are free;
// weight_fused must be apart from the inputs. Bytes: n*d*(4 + the weights' sizes). Contract 1.8.
struct FusedWeight {
  Tensor weight_hidden{};  // BF16 or F32[n, d]
  Tensor weight_embed{};   // BF16 or F32[n, d]
  Tensor weight_fused{};   // out: F32[n, d]
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void fused_weight(Context& context, const FusedWeight& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const FusedWeight& params);

}  // namespace ehc::engram
