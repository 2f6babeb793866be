// mhc.pre_fwd, mhc.pre_bwd: the entry of a sublayer, from streams to its input and coefficients.
// mhc.head_fwd, mhc.head_bwd: the streams collapsed for the head of the model.
#pragma once

#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/mhc/sublayer.h"
#include "ehc/tensor.h"

namespace ehc::mhc {

// merge_fwd (with norm_weight) -> prenorm_gemm -> reduce_partials_fwd -> split_fwd -> sinkhorn_fwd
// -> pre_apply_fwd, the bits of these; with layer_norm_weight the layer norm of pre_big_fuse behind
// them. See the headers of those for formulas.
//
// state.comb is always written; the other five of `state` all or none: saving them changes no bit.
// A is BF16, F16 or F32, W BF16 or F32; n is 1..8, N = n*n + 2n. T may be several leading
// dimensions. Strides are free but for the last dimension. Aliasing: none. Determinism: a token
// depends on itself alone; same bits for any threads, strides, alignment. Bytes per token in 16-bit
// types: (2n+2)*d where a block of tokens stays in the caches between projection and collapse.
// Contract 2.13.
struct PreForward {
  Tensor residual{};                       // A[T, n, d]
  MixWeights weights{};                    // F32
  Tensor layer_norm_weight{};              // W[d], optional
  Tensor layer_input{};                    // out: A[T, d]
  Tensor post{};                           // out: F32[T, n]
  MixState state{};                        // out: comb, and what is to be saved
  std::optional<double> layer_norm_eps{};  // > 0, required with layer_norm_weight
  MixRules rules{};
  Precision precision = Precision::fp32;
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void pre_fwd(Context& context, const PreForward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const PreForward& params);

// The gradients of pre_fwd:
//   layer norm -> pre_apply_bwd -> sinkhorn_bwd -> split_bwd -> split_bwd_reduce
//   -> reduce_partials_bwd -> norm_fn_bwd -> merge_bwd (with norm_weight)
// rounding chain gives the bits of these operators called one after the other. With once
//   grad_residual[t,i,:] = round(grad_residual_acc + pre_i * g + (sum_j m_j fn[j] + 2 x q))
// is fp32 throughout, where g is the gradient of the collapsed row, m and q those of the sums of
// the projection. An upstream gradient that is absent counts as zeros; `targets` and
// grad_residual_acc are added to where they are given. state: all that pre_fwd saved, or nothing,
// then it is made again; same bits.
//
// Aliasing: a gradient may be the very same view as its target; all else apart. Determinism: the
// gradients of a token depend on it alone but for the number T of tokens; sums over tokens are cut
// by T alone. Bytes per token in 16-bit types: (2n+2)*d and (6n+2)*d.
struct PreBackward {
  Tensor grad_layer_input{};               // A[T, d], optional
  Tensor grad_post{};                      // F32[T, n], optional
  Tensor grad_comb{};                      // F32[T, n, n], optional
  Tensor residual{};                       // A[T, n, d]
  MixWeights weights{};                    // F32
  Tensor layer_norm_weight{};              // W[d], optional
  Tensor grad_residual_acc{};              // A[T, n, d], optional: added to
  MixGradients targets{};                  // F32, each optional: added to
  Tensor grad_layer_norm_weight_acc{};     // F32[d], optional: added to
  MixState state{};                        // of the forward, all or none
  Tensor grad_residual{};                  // out: A[T, n, d]; may be grad_residual_acc
  MixGradients gradients{};                // out: F32; each may be its target
  Tensor grad_layer_norm_weight{};         // out: F32[d], with layer_norm_weight
  std::optional<double> layer_norm_eps{};  // > 0, required with layer_norm_weight
  MixRules rules{};
  Precision precision = Precision::fp32;
  Rounding rounding = Rounding::once;
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void pre_bwd(Context& context, const PreBackward& params);
EHC_API size_t workspace_bytes(const Context& context, const PreBackward& params);

// hidden = pre_apply_fwd(residual, head_mix_fwd(mixes)) with the mixes of merge_fwd, prenorm_gemm
// and reduce_partials_fwd; the bits of these. Layout, determinism and bytes as above.
// Contract 2.13.
struct HeadForward {
  Tensor residual{};                 // A[T, n, d]
  MixWeights weights{};              // fn F32[n, n*d], scale F32[1], base F32[n]
  Tensor hidden{};                   // out: A[T, d]
  std::optional<double> norm_eps{};  // > 0, required
  std::optional<double> pre_eps{};   // >= 0, required
  RmsForm rms = RmsForm::mean;
  Precision precision = Precision::fp32;
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void head_fwd(Context& context, const HeadForward& params);
EHC_API size_t workspace_bytes(const Context& context, const HeadForward& params);

// The gradients of head_fwd, with the mixes made again; as pre_bwd, with head_mix_bwd in place of
// sinkhorn_bwd and split_bwd.
struct HeadBackward {
  Tensor grad_hidden{};              // A[T, d]
  Tensor residual{};                 // A[T, n, d]
  MixWeights weights{};              // fn F32[n, n*d], scale F32[1], base F32[n]
  MixGradients targets{};            // F32, each optional: added to
  Tensor grad_residual{};            // out: A[T, n, d]
  MixGradients gradients{};          // out: F32; each may be its target
  std::optional<double> norm_eps{};  // > 0, required
  std::optional<double> pre_eps{};   // >= 0, required
  RmsForm rms = RmsForm::mean;
  Precision precision = Precision::fp32;
  Rounding rounding = Rounding::once;
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void head_bwd(Context& context, const HeadBackward& params);
EHC_API size_t workspace_bytes(const Context& context, const HeadBackward& params);

}  // namespace ehc::mhc
