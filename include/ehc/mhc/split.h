// mhc.split_fwd, mhc.split_bwd, mhc.split_bwd_reduce: the mixes of a token split into the
// coefficients of its sublayer.
#pragma once

#include <cstdint>
#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::mhc {

// N = n*n + 2n mixes are n of pre, n of post and n*n of comb, row by row. With u = mixes * scale +
// base, by fma, and the scale of the segment:
//   pre = sigmoid(u) + pre_eps     post = post_mult * sigmoid(u)     comb_logits = u
//
// n is 1..8. T may be several leading dimensions. All is fp32. Strides are free but for the last
// dimension. Aliasing: none. Determinism: a token depends on itself alone; same bits for any
// threads, strides, alignment. Bytes per token: 8*N. Contract 2.6.
struct SplitForward {
  Tensor mixes{};                     // F32[T, N]
  Tensor scale{};                     // F32[3]: of pre, post, comb
  Tensor base{};                      // F32[N]
  Tensor pre{};                       // out: F32[T, n]
  Tensor post{};                      // out: F32[T, n]
  Tensor comb_logits{};               // out: F32[T, n, n], [input stream, output stream]
  std::optional<double> pre_eps{};    // >= 0, required
  std::optional<double> post_mult{};  // >= 0, required
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void split_fwd(Context& context, const SplitForward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const SplitForward& params);

// With s = sigmoid(u), whose slope s (1 - s) is computed without cancellation:
//   of u:         grad_pre * slope, (grad_post * post_mult) * slope, grad_comb_logits
//   grad_mixes  = (of u) * scale
//   grad_base_partial[p,j]  = sum of (of u_j) over the tokens of chunk p
//   grad_scale_partial[p,i] = sum of (of u_j) * mixes_j over them and the segment i
// P = split_partials(T) is a function of T alone. Aliasing: none. Determinism: grad_mixes depends
// on its token alone; the partials are class R. Bytes per token: 12*N.
struct SplitBackward {
  Tensor grad_pre{};                  // F32[T, n]
  Tensor grad_post{};                 // F32[T, n]
  Tensor grad_comb_logits{};          // F32[T, n, n]
  Tensor mixes{};                     // F32[T, N]
  Tensor scale{};                     // F32[3]
  Tensor base{};                      // F32[N]
  Tensor grad_mixes{};                // out: F32[T, N]
  Tensor grad_scale_partial{};        // out: F32[P, 3]
  Tensor grad_base_partial{};         // out: F32[P, N]
  std::optional<double> post_mult{};  // >= 0, required
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void split_bwd(Context& context, const SplitBackward& params);
EHC_API size_t workspace_bytes(const Context& context, const SplitBackward& params);

// P, the number of partial sums over so many tokens: at most 128, 0 for none.
EHC_API int64_t split_partials(int64_t tokens);

// grad_scale = grad_scale_acc + sum_p grad_scale_partial[p], grad_base likewise; p ascends from +0,
// an absent target counts as zeros. Q is 3, or 1 for the mixes of the head, whose N may be any
// number from 1 to 80. P = 0 gives zeros or the targets. Aliasing: a gradient may be the very same
// view as its target; all else apart. Same bits in every implementation but the double reference.
struct SplitBackwardReduce {
  Tensor grad_scale_partial{};  // F32[P, Q]
  Tensor grad_base_partial{};   // F32[P, N]
  Tensor grad_scale_acc{};      // F32[Q], optional
  Tensor grad_base_acc{};       // F32[N], optional
  Tensor grad_scale{};          // out: F32[Q]; may be grad_scale_acc
  Tensor grad_base{};           // out: F32[N]; may be grad_base_acc
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void split_bwd_reduce(Context& context, const SplitBackwardReduce& params);
EHC_API size_t workspace_bytes(const Context& context, const SplitBackwardReduce& params);

}  // namespace ehc::mhc
