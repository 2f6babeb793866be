// mhc.norm_fn_bwd: the gradients of a projection, of the streams and of fn.
#pragma once

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/mhc/prenorm_gemm.h"
#include "ehc/tensor.h"

namespace ehc::mhc {

// The backward of prenorm_gemm, of its sums over splits. With x[t,k] the K = n*d flattened streams,
// g the group of column k:
//   s[t,k] = sum_j grad_mul[t,g,j] * fn[j,k] + 2 * x[t,k] * grad_sqr[t,g]
//   grad_residual[t,k] = round(acc + s[t,k])
//   grad_fn[j,k] = acc + sum_t grad_mul[t,g,j] * x[t,k]
// The first sum ascends from +0 by fma. The second is over chunks of tokens that T alone decides,
// each from +0 in token order by fma, added in ascending order. With precision tf32 fn is rounded
// as in the forward; the token side never is. The axis G is there in both gradients or in neither.
//
// A is BF16, F16 or F32. Strides are free but for the last dimension. Aliasing: a gradient may be
// the very same view as its target; all else apart. Determinism: class E, the same bits from every
// implementation but the double reference; grad_residual of a token depends on it alone. Bytes per
// token in 16-bit types: 4*n*d, with a target 6*n*d. Contract 2.5.
struct NormFnBackward {
  Tensor grad_mul{};           // F32[T, M] or F32[T, G, M], M is 1..80
  Tensor grad_sqr{};           // F32[T] or F32[T, G]
  Tensor residual{};           // A[T, n, d]
  Tensor fn{};                 // F32[M, n*d]
  Tensor grad_residual_acc{};  // A[T, n, d], optional: added to
  Tensor grad_fn_acc{};        // F32[M, n*d], optional: added to
  Tensor grad_residual{};      // out: A[T, n, d]; may be grad_residual_acc
  Tensor grad_fn{};            // out: F32[M, n*d]; may be grad_fn_acc
  Precision precision = Precision::fp32;
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void norm_fn_bwd(Context& context, const NormFnBackward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const NormFnBackward& params);

}  // namespace ehc::mhc
