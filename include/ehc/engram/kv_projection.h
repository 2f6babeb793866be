// engram.kv_projection_fwd: from embeddings to the keys of all streams and the value.
#pragma once

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// kv[t, j, i] = round(sum_e embedding[t, e] * weight[j, i, e] + bias[j, i]): rows j < n are the
// keys of the streams, row n is the value. One matrix product [T,E] x [E,(n+1)*d]; operands are
// widened to fp32 and sums are fp32, so BF16 and F16 lose nothing before the one rounding at the
// end.
//
// A is BF16, F16 or F32, one type per call. T may be several leading dimensions that flatten;
// strides are free but for the last dimension. kv must be apart from the inputs. Determinism: same
// bits from run to run and for any number of threads; a token's bits may depend on T
// (cpu.openblas) or not (the others). Workspace: ask workspace_bytes with the same context. Cost:
// 2*T*E*(n+1)*d FLOP; bytes at least those of the tensors. Contract 1.7.
struct KvProjectionForward {
  Tensor embedding{};  // A[T, E], E = C*hd
  Tensor weight{};     // A[n+1, d, E]
  Tensor bias{};       // A[n+1, d], optional
  Tensor kv{};         // out: A[T, n+1, d]
};

// Throws Error{contract} for arguments that break the above and a workspace that is too small.
EHC_API void kv_projection_fwd(Context& context, const KvProjectionForward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const KvProjectionForward& params);

}  // namespace ehc::engram
