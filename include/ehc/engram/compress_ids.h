// engram.compress_ids: from token ids to compressed ids.
#pragma once

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// compressed_ids[t] = table[ids[t]] for 0 <= id < V. A negative id passes through. An id >= V, or
// below the range of I32, is an error when `checked`, else it becomes -1, "no id". Exact. T may
// be several leading dimensions that flatten. compressed_ids must be apart from the inputs. Bytes
// per token: 4 or 8 and 4 gathered read, 4 written. Contract 1.1.
struct CompressIds {
  Tensor ids{};             // I32 or I64[T]
  Tensor table{};           // I32[V], the output of token_map
  Tensor compressed_ids{};  // out: I32[T]
  bool checked = true;
};

// Throws Error{contract}, before anything is written, for an id that has no place in the table
// (CPU only: a device's ids are not read; there it becomes -1).
EHC_API void compress_ids(Context& context, const CompressIds& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const CompressIds& params);

}  // namespace ehc::engram
