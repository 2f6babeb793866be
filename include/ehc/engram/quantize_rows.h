// engram.quantize_rows: table rows in their 8-bit format.
#pragma once

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// For each `group` of values in a row, with amax = max |value|:
//   e = smallest integer with amax / 2^e <= 448, at least -127;
//   scale = e + 127; weight = e4m3fn(value / 2^e), to nearest even, signs of zeros kept.
// amax = 0 gives scale 127. Infinite amax gives e = 127 and weights of +-448 for infinities. A NaN
// in the group gives scale 255 and weights 0x7f. Exact. engram.dequant_rows is the way back; what
// came from there is found again.
//
// `group` divides hd. Strides are free but for the last dimension; outputs must be apart from the
// input and from each other. Bytes per row: hd elements read, hd + hd/group written. Contract 1.6.
struct QuantizeRows {
  Tensor values{};     // F32 or BF16[rows, hd]
  int64_t group = 32;  // >= 1
  Tensor weight{};     // out: F8_E4M3[rows, hd]
  Tensor scale{};      // out: F8_E8M0[rows, hd/group]
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void quantize_rows(Context& context, const QuantizeRows& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const QuantizeRows& params);

}  // namespace ehc::engram
