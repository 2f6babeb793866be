// The boundary between two sublayers: the exit of one (post) and the entry of the next one (pre).
//   mhc.seam_classic_fwd, _bwd      the new streams are collapsed with their own mix
//   mhc.seam_single_pass_fwd, _bwd  with a mix that was made one sublayer earlier
//   mhc.seam_broadcast_fwd, _bwd    the first entry of a stack, whose streams are all one row
#pragma once

#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/mhc/sublayer.h"
#include "ehc/tensor.h"

namespace ehc::mhc {

// new_residual = post_fwd(layer_output, residual, post, comb), then pre_fwd of the rounded
// new_residual with the parameters of the next sublayer; the bits of these. See post.h and pre.h.
// post and comb are those of the sublayer that ends, next_post and next_state of the one that
// begins. next_state.comb is always written; the other five all or none.
//
// Types, layout and determinism as there. Aliasing: none. Bytes per token in 16-bit types:
// (3n+2)*d, of a block of tokens that stays in the caches (2n+2)*d. models 1.1.
struct SeamClassicForward {
  Tensor layer_output{};                   // A[T, d]
  Tensor residual{};                       // A[T, n, d]
  Tensor post{};                           // F32[T, n]
  Tensor comb{};                           // F32[T, n, n]
  MixWeights weights{};                    // F32, of the next sublayer
  Tensor layer_norm_weight{};              // W[d], optional
  Tensor new_residual{};                   // out: A[T, n, d]
  Tensor layer_input{};                    // out: A[T, d]
  Tensor next_post{};                      // out: F32[T, n]
  MixState next_state{};                   // out: comb, and what is to be saved
  std::optional<double> layer_norm_eps{};  // > 0, required with layer_norm_weight
  MixRules rules{};
  Precision precision = Precision::fp32;
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void seam_classic_fwd(Context& context, const SeamClassicForward& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const SeamClassicForward& params);

// pre_bwd with grad_new_residual as its target, then post_bwd of what comes out; see post.h, pre.h.
// rounding chain rounds between the two and gives their bits; once hands on fp32. Absent upstream
// gradients count as zeros. new_residual and next_state: what the forward made, all or none;
// without them both are made again, with the same bits, in the workspace.
//
// Aliasing: a gradient may be the very same view as its target; all else apart. Bytes per token in
// 16-bit types with the saved state: (12n+8)*d.
struct SeamClassicBackward {
  Tensor grad_new_residual{};              // A[T, n, d], optional
  Tensor grad_layer_input{};               // A[T, d], optional
  Tensor grad_next_post{};                 // F32[T, n], optional
  Tensor grad_next_comb{};                 // F32[T, n, n], optional
  Tensor layer_output{};                   // A[T, d]
  Tensor residual{};                       // A[T, n, d]
  Tensor post{};                           // F32[T, n]
  Tensor comb{};                           // F32[T, n, n]
  MixWeights weights{};                    // F32, of the next sublayer
  Tensor layer_norm_weight{};              // W[d], optional
  MixGradients targets{};                  // F32, each optional: added to
  Tensor grad_layer_norm_weight_acc{};     // F32[d], optional: added to
  Tensor new_residual{};                   // A[T, n, d], with next_state
  MixState next_state{};                   // of the forward, all or none
  Tensor grad_layer_output{};              // out: A[T, d]
  Tensor grad_residual{};                  // out: A[T, n, d]
  Tensor grad_post{};                      // out: F32[T, n]
  Tensor grad_comb{};                      // out: F32[T, n, n]
  MixGradients gradients{};                // out: F32; each may be its target
  Tensor grad_layer_norm_weight{};         // out: F32[d], with layer_norm_weight
  std::optional<double> layer_norm_eps{};  // > 0, required with layer_norm_weight
  MixRules rules{};
  Precision precision = Precision::fp32;
  Rounding rounding = Rounding::once;
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void seam_classic_bwd(Context& context, const SeamClassicBackward& params);
EHC_API size_t workspace_bytes(const Context& context, const SeamClassicBackward& params);

// As seam_classic_fwd, but layer_input = pre_apply_fwd(new_residual, pre) with the given `pre`. The
// mixes of the new streams, next_state.pre among them, are for the seam after this one; pre and
// comb of next_state are always written, the other four all or none. models 1.2.
struct SeamSinglePassForward {
  Tensor layer_output{};                   // A[T, d]
  Tensor residual{};                       // A[T, n, d]
  Tensor pre{};                            // F32[T, n], made one sublayer earlier
  Tensor post{};                           // F32[T, n]
  Tensor comb{};                           // F32[T, n, n]
  MixWeights weights{};                    // F32, of the next sublayer
  Tensor layer_norm_weight{};              // W[d], optional
  Tensor new_residual{};                   // out: A[T, n, d]
  Tensor layer_input{};                    // out: A[T, d]
  Tensor next_post{};                      // out: F32[T, n]
  MixState next_state{};                   // out: pre, comb, and what is to be saved
  std::optional<double> layer_norm_eps{};  // > 0, required with layer_norm_weight
  MixRules rules{};
  Precision precision = Precision::fp32;
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void seam_single_pass_fwd(Context& context, const SeamSinglePassForward& params);
EHC_API size_t workspace_bytes(const Context& context, const SeamSinglePassForward& params);

// As seam_classic_bwd; what the collapse passes back to its mix is grad_pre here, and the gradient
// of the new mix is grad_next_pre.
struct SeamSinglePassBackward {
  Tensor grad_new_residual{};              // A[T, n, d], optional
  Tensor grad_layer_input{};               // A[T, d], optional
  Tensor grad_next_pre{};                  // F32[T, n], optional
  Tensor grad_next_post{};                 // F32[T, n], optional
  Tensor grad_next_comb{};                 // F32[T, n, n], optional
  Tensor layer_output{};                   // A[T, d]
  Tensor residual{};                       // A[T, n, d]
  Tensor pre{};                            // F32[T, n]
  Tensor post{};                           // F32[T, n]
  Tensor comb{};                           // F32[T, n, n]
  MixWeights weights{};                    // F32, of the next sublayer
  Tensor layer_norm_weight{};              // W[d], optional
  MixGradients targets{};                  // F32, each optional: added to
  Tensor grad_layer_norm_weight_acc{};     // F32[d], optional: added to
  Tensor new_residual{};                   // A[T, n, d], with next_state
  MixState next_state{};                   // of the forward, all or none
  Tensor grad_layer_output{};              // out: A[T, d]
  Tensor grad_residual{};                  // out: A[T, n, d]
  Tensor grad_pre{};                       // out: F32[T, n]
  Tensor grad_post{};                      // out: F32[T, n]
  Tensor grad_comb{};                      // out: F32[T, n, n]
  MixGradients gradients{};                // out: F32; each may be its target
  Tensor grad_layer_norm_weight{};         // out: F32[d], with layer_norm_weight
  std::optional<double> layer_norm_eps{};  // > 0, required with layer_norm_weight
  MixRules rules{};
  Precision precision = Precision::fp32;
  Rounding rounding = Rounding::once;
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void seam_single_pass_bwd(Context& context, const SeamSinglePassBackward& params);
EHC_API size_t workspace_bytes(const Context& context, const SeamSinglePassBackward& params);

// classic: the row is collapsed with the new pre; single_pass: with the one-hot mix on stream 0, so
// that the layer input is the row itself (normalised, where there is a layer norm).
enum class SeamForm { classic, single_pass };

// residual[t,i,:] = hidden[t,:] for all n streams, then pre of them. They are equal, so the
// projection is that of one row with sum_i fn[j,i,:], the merged parts added in ascending order in
// fp32 (and with tf32 rounded after that), and the mean of its squares is that of hidden.
//
// Types, layout and determinism as in pre.h. pre and comb of `state` are always written, the other
// four all or none. Aliasing: none. Bytes per token in 16-bit types: (n+2)*d. models 1.3.
struct SeamBroadcastForward {
  Tensor hidden{};                         // A[T, d]
  MixWeights weights{};                    // F32
  Tensor layer_norm_weight{};              // W[d], optional
  Tensor residual{};                       // out: A[T, n, d]
  Tensor layer_input{};                    // out: A[T, d]
  Tensor post{};                           // out: F32[T, n]
  MixState state{};                        // out: pre, comb, and what is to be saved
  std::optional<double> layer_norm_eps{};  // > 0, required with layer_norm_weight
  MixRules rules{};
  Precision precision = Precision::fp32;
  SeamForm form = SeamForm::classic;
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void seam_broadcast_fwd(Context& context, const SeamBroadcastForward& params);
EHC_API size_t workspace_bytes(const Context& context, const SeamBroadcastForward& params);

// The gradients of seam_broadcast_fwd, fp32 between its steps (rounding once):
//   p = sum_j m_j f_j + 2 x q
//   grad_hidden[t,:] = round(sum_i grad_residual[t,i,:] + (sum_i pre_i) g + p)
// with f the summed fn and without the factor of g in the single_pass form; each part of fn has the
// gradient of the sum. Absent upstream gradients count as zeros. Aliasing: a gradient of a
// parameter may be the very same view as its target; all else apart.
struct SeamBroadcastBackward {
  Tensor grad_residual{};                  // A[T, n, d], optional
  Tensor grad_layer_input{};               // A[T, d], optional
  Tensor grad_pre{};                       // F32[T, n], optional
  Tensor grad_post{};                      // F32[T, n], optional
  Tensor grad_comb{};                      // F32[T, n, n], optional
  Tensor hidden{};                         // A[T, d]
  MixWeights weights{};                    // F32
  Tensor layer_norm_weight{};              // W[d], optional
  MixGradients targets{};                  // F32, each optional: added to
  Tensor grad_layer_norm_weight_acc{};     // F32[d], optional: added to
  MixState state{};                        // of the forward, all or none
  Tensor grad_hidden{};                    // out: A[T, d]
  MixGradients gradients{};                // out: F32; each may be its target
  Tensor grad_layer_norm_weight{};         // out: F32[d], with layer_norm_weight
  std::optional<double> layer_norm_eps{};  // > 0, required with layer_norm_weight
  MixRules rules{};
  Precision precision = Precision::fp32;
  SeamForm form = SeamForm::classic;
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void seam_broadcast_bwd(Context& context, const SeamBroadcastBackward& params);
EHC_API size_t workspace_bytes(const Context& context, const SeamBroadcastBackward& params);

}  // namespace ehc::mhc
