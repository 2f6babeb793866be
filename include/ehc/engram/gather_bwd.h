// engram.gather_bwd: gradient of the table rows that engram.gather_fwd fetched.
#pragma once

#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// The gradient of row r is the sum of grad_embedding[t, c*hd : (c+1)*hd] over all (t, c) with
// indices[t, c] = r, in fp32; index -1 adds nothing. Two forms, chosen by the outputs:
//   dense    grad_table[r] = that sum, plus grad_table_acc[r] where there is a target. Rows that no
//            index names are zero, or the target's, bit for bit.
//   sparse   unique_rows = the U rows that indices name, ascending; grad_rows[u] = the sum of row
//            unique_rows[u]. Both have room for T*C rows: unique_rows is -1 from U on, and
//            grad_rows is not written there. *unique_count, where given, receives U.
// Dense and sparse sums have the same bits.
//
// A is BF16, F16 or F32. T may be several leading dimensions that flatten; strides are free but for
// the last dimension. grad_table may be grad_table_acc itself, which then costs only the rows that
// are named; all other outputs must be apart from everything. Determinism: same bits from run to
// run, for any number of threads, strides, alignment and instruction set. The summands of a row are
// taken in ascending (t, c): chains of 256 (the last of up to 511) from +0, whose sums are added in
// chains again.
// Workspace: ask workspace_bytes; about 16 bytes an index, on a device 20 and a bit a row of the
// table. Bytes: grad_embedding and indices once, each output row once, 16 bytes an index and digit
// of 11 bits for sorting (on a device 24, of 8 bits). Contract 1.6.
struct GatherBackward {
  Tensor grad_embedding{};          // A[T, C*hd]
  Tensor indices{};                 // I32 or I64[T, C]
  Tensor grad_table_acc{};          // F32[rows, hd], optional, dense form only
  std::optional<int64_t> rows{};    // of the table; required without grad_table_acc
  Tensor grad_table{};              // out, dense: F32[rows, hd]
  Tensor unique_rows{};             // out, sparse: [T*C], of the dtype of indices
  Tensor grad_rows{};               // out, sparse: F32[T*C, hd]
  int64_t* unique_count = nullptr;  // out, sparse, optional: U, on the context's device
};

// Throws Error{contract}, before anything is written, for an index below -1 or >= rows (CPU only: a
// device's indices are not read), and for a workspace that is too small.
EHC_API void gather_bwd(Context& context, const GatherBackward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const GatherBackward& params);

}  // namespace ehc::engram
