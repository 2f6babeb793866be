// engram.gather_dequant: addressed rows of a table in the 8-bit format.
#pragma once

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// embedding[t, c*hd : (c+1)*hd] = values[indices[t, c]] with the values of engram.dequant_rows
// (which see for the format), zeros for index -1, "no row". The bits of dequant_rows followed by
// gather_fwd, without the decoded table. Exact.
//
// `group` divides hd. T may be several leading dimensions that flatten; strides are free but for
// the last dimension. embedding must be apart from the inputs. Bytes per token: C*(hd + hd/group)
// and C indices read, C*hd elements written.
struct GatherDequant {
  Tensor weight{};     // F8_E4M3 or U8[rows, hd]
  Tensor scale{};      // F8_E8M0 or U8[rows, hd/group]
  Tensor indices{};    // I32 or I64[T, C]
  int64_t group = 32;  // >= 1
  Tensor embedding{};  // out: BF16, F16 or F32[T, C*hd]
};

// Throws Error{contract}, before anything is written, for an index below -1 or >= rows (CPU only: a
// device's indices are not read). No workspace.
EHC_API void gather_dequant(Context& context, const GatherDequant& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const GatherDequant& params);

}  // namespace ehc::engram
