// engram.gate_fwd: how much of the looked-up value each residual stream lets in.
#pragma once

#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// Per token t and stream h, with x = residual[t,h], k = key[t,h], v = value[t], wf =
// weight_fused[h]:
//   dot = sum (x * wf) * k       rstd_residual = 1 / sqrt(mean x^2 + eps)   rstd_key likewise of k
//   z = ((dot * rstd_residual) * rstd_key) / sqrt(d)
//   alpha = sigmoid(copysign(sqrt(max(|z|, clamp)), z))
//   out = round(x + alpha * v)            mode add
//         round(alpha * v)                mode value
//         none, but alpha and mean v^2    mode stats
// Sums are fp32 and start from +0, so zero products give dot = +0 and alpha slightly above 1/2; a
// negative dot, however small, gives alpha slightly below 1/2. NaN in x or k makes the gate of that
// stream NaN.
//
// A is BF16, F16 or F32, one type per call. T may be several leading dimensions. Strides are free
// but for the last dimension; no bit depends on them.
// Masked tokens: out = residual bit for bit (0 in mode value), statistics 0, key and value not
// read. Statistics: pass all four of dot, alpha, rstd_residual, rstd_key or none (mode stats: alpha
// alone is fine). Saving them changes no bit of out. Aliasing: out may be the very same view as
// residual (in place), except together with the saved statistics, whose backward pass needs the
// original residual. All else must be apart. Determinism: a token's outputs depend on that token
// alone, for any number of threads; same bits from run to run of one implementation. Bytes per
// token in 16-bit types: (6n+2)*d, and 16n for the statistics. Contract 1.9.
struct GateForward {
  enum class Mode { add, value, stats };

  Tensor residual{};              // A[T, n, d]
  Tensor kv{};                    // A[T, n+1, d], row n is the value; or, instead:
  Tensor key{};                   // A[T, n, d]
  Tensor value{};                 // A[T, d]
  Tensor weight_fused{};          // F32[n, d], weight_hidden * weight_embed
  Tensor image_token_mask{};      // BOOL[T], optional; true = image
  Tensor out{};                   // out: A[T, n, d], absent in mode stats
  Tensor dot{};                   // out: F32[T, n], before any scaling
  Tensor alpha{};                 // out: F32[T, n]
  Tensor rstd_residual{};         // out: F32[T, n]
  Tensor rstd_key{};              // out: F32[T, n]
  Tensor value_mean_square{};     // out: F32[T], mode stats only
  std::optional<double> eps{};    // > 0, required
  std::optional<double> clamp{};  // > 0, required
  Mode mode = Mode::add;
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void gate_fwd(Context& context, const GateForward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const GateForward& params);

}  // namespace ehc::engram
