// engram.gate_bwd: gradients of the gate.
#pragma once

#include <cstdint>
#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// Backward of gate_fwd (mode add). Per token t and stream h, with x = residual[t,h], k = key[t,h],
// v = value[t], wf = weight_fused[h], D, alpha, rx, rk the forward's statistics, go = grad_out[t,h]
// and gp = grad_value_path[t,h] (absent: go):
//   z = ((D * rx) * rk) / sqrt(d), as in the forward      grad_alpha = sum gp * v
//   slope = grad_alpha * alpha (1 - alpha) / 2 * rx * rk / sqrt(d |z|)
//           0 where |z| < clamp and where D = 0
//   grad_residual[t,h] = round(go + slope * (k * wf - x * D rx^2 / d))
//   grad_key[t,h]      = round(slope * (x * wf - k * D rk^2 / d))
//   grad_value[t]      = round(sum over h of alpha[t,h] * gp)
//   grad_weight_partial[p,h] = sum of slope * x * k over the tokens of chunk p
// A gradient of the value path of its own is what a convolution behind the gate has.
// The partials are sums over chunks of tokens, not yet a gradient: grad_w_reduce makes it.
// P = gate_weight_partials(T).
//
// A is BF16, F16 or F32, one type per call. T may be several leading dimensions. Strides are free
// but for the last dimension; no bit depends on them. kv, key, value, their gradients: packed in
// and out or apart in and out. Statistics: pass all four that gate_fwd saved, or none; then eps is
// required, they are computed again, and every output has the same bits. Masked tokens:
// grad_residual = grad_out bit for bit, gradients of kv 0, no part in the partials; residual, kv,
// grad_value_path and statistics are not read. Aliasing: outputs apart from everything.
// Determinism: the gradients of a token depend on that token alone; partials on T and the tokens of
// their chunk, in token order, for any number of threads; same bits from run to run of one
// implementation. Bytes per token in 16-bit types: (10n+4)*d, 16n of statistics. Contract 1.10.
struct GateBackward {
  Tensor grad_out{};              // A[T, n, d]
  Tensor grad_value_path{};       // A[T, n, d], optional
  Tensor residual{};              // A[T, n, d]
  Tensor kv{};                    // A[T, n+1, d], row n is the value; or, instead:
  Tensor key{};                   // A[T, n, d]
  Tensor value{};                 // A[T, d]
  Tensor weight_fused{};          // F32[n, d]
  Tensor dot{};                   // F32[T, n], optional, with the next three
  Tensor alpha{};                 // F32[T, n]
  Tensor rstd_residual{};         // F32[T, n]
  Tensor rstd_key{};              // F32[T, n]
  Tensor image_token_mask{};      // BOOL[T], optional; true = image
  Tensor grad_residual{};         // out: A[T, n, d]
  Tensor grad_kv{};               // out: A[T, n+1, d] with kv; else:
  Tensor grad_key{};              // out: A[T, n, d]
  Tensor grad_value{};            // out: A[T, d]
  Tensor grad_weight_partial{};   // out: F32[P, n, d]
  std::optional<double> clamp{};  // > 0, required
  std::optional<double> eps{};    // > 0, required without statistics, else of no effect
};

// Throws Error{contract} for arguments that break the above. No workspace but for the reference.
EHC_API void gate_bwd(Context& context, const GateBackward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const GateBackward& params);

// P, the number of partial sums for T tokens: at most 128, 0 for none.
EHC_API int64_t gate_weight_partials(int64_t tokens);

}  // namespace ehc::engram
