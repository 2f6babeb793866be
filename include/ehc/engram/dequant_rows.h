// engram.dequant_rows: table rows from their 8-bit format.
#pragma once

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// values[r, i] = round(float(weight[r, i]) * 2^(scale[r, i / group] - 127)): e4m3fn weights, one
// ue8m0 scale for `group` of them in a row. Scale 0 is 2^-127; scale 255 gives NaN, as do weights
// 0x7f and 0xff. One rounding to the dtype of `values`, to nearest even; subnormals are kept and
// what is too large becomes inf. U8 tensors hold the same bytes. Exact: the same values everywhere,
// and with one bit pattern for NaN (quiet, with the sign of a NaN weight).
//
// `group` divides hd. Strides are free but for the last dimension; values must be apart from the
// inputs. Bytes per row: hd + hd/group read, hd elements written. The row format of DeepSeek-V4.1;
// engram.quantize_rows is the way back.
struct DequantRows {
  Tensor weight{};     // F8_E4M3 or U8[rows, hd]
  Tensor scale{};      // F8_E8M0 or U8[rows, hd/group]
  int64_t group = 32;  // >= 1
  Tensor values{};     // out: BF16, F16 or F32[rows, hd]
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void dequant_rows(Context& context, const DequantRows& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const DequantRows& params);

}  // namespace ehc::engram
