// engram.gather_fwd: the rows of a table that the hash addressed, side by side.
#pragma once

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// embedding[t, c*hd : (c+1)*hd] = table[indices[t, c]], zeros for index -1, "no row". The elements
// are converted to the dtype of `embedding`: the table's own keeps every bit, a narrower one rounds
// to nearest even once. Exact. T may be several leading dimensions that flatten; strides are free
// but for the last dimension. embedding must be apart from the inputs. Bytes per token:
// C*hd*(bytes read + bytes written) + 4*C (or 8*C). Contract 1.6.
struct GatherForward {
  Tensor table{};      // BF16, F16 or F32[rows, hd]
  Tensor indices{};    // I32 or I64[T, C]
  Tensor embedding{};  // out: BF16, F16 or F32[T, C*hd]
};

// Throws Error{contract}, before anything is written, for an index below -1 or >= rows (CPU only: a
// device's indices are not read).
EHC_API void gather_fwd(Context& context, const GatherForward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const GatherForward& params);

}  // namespace ehc::engram
