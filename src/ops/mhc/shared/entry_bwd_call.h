// The entry of a sublayer backwards, from the gradients of its outputs to those of the streams and
// of the parameters; also of the head and of a first entry, see entry_call.h.
#pragma once

#include "core/token_chunks.h"
#include "ops/mhc/shared/entry_call.h"

namespace ehc::mhc {

// A gradient of a parameter and what it is added to, F32. Null target: zeros.
struct VectorGradient {
  const float* target = nullptr;
  float* gradient = nullptr;
};
struct ParameterGradients {
  MixRows fn_target, fn;  // F32[N,K]
  VectorGradient scale, base, norm_weight, layer_norm_weight;
};

inline VectorGradient vector_gradient(const Tensor& target, const Tensor& gradient) {
  return {target.as<float>(), gradient.as<float>()};
}
template <class P>
ParameterGradients parameter_gradients(const P& p) {
  const MixGradients& t = p.targets;
  const MixGradients& g = p.gradients;
  ParameterGradients all = {mix_rows(t.grad_fn),
                            mix_rows(g.grad_fn),
                            vector_gradient(t.grad_scale, g.grad_scale),
                            vector_gradient(t.grad_base, g.grad_base),
                            vector_gradient(t.grad_norm_weight, g.grad_norm_weight),
                            {}};
  if constexpr (requires { p.grad_layer_norm_weight; }) {
    all.layer_norm_weight = vector_gradient(p.grad_layer_norm_weight_acc, p.grad_layer_norm_weight);
  }
  return all;
}

// Which mix collapses the streams, and so gets a gradient from it.
enum class Collapse {
  own,      // the one that is made of these streams
  earlier,  // one that was given
  first,    // stream 0 alone
};

struct EntryBackwardArgs {
  StreamRows grad_layer_input;                  // A[T,d]
  Coefficients grad_pre, grad_post, grad_comb;  // of what the entry makes
  StreamRows grad_streams;                      // A[T,n,d]: added to what comes out
  StreamRows grad_out;                          // A[T,n,d], of equal streams A[T,d]; written
  bool in_blocks = false;                       // instead, blocks of it go to the caller
  Collapse collapse = Collapse::own;
  Coefficients earlier_pre, grad_earlier_pre;  // F32[T,n], with Collapse::earlier
  bool chain = false;                          // round as separate operators do
  ParameterGradients parameters;
};
// Null data of an upstream gradient: zeros, which go through the formulas as given ones do (NaN
// times 0 is NaN).

template <class Kernels>
class EntryBackward {
 public:
  // Takes its arrays from the workspace and looks at no tensor.
  EntryBackward(Context& context, const Kernels& kernels, const Entry<Kernels>& entry,
                const EntryState& state, const EntryBackwardArgs& args, Workspace& workspace)
      : context_(context),
        kernels_(kernels),
        entry_(entry),
        a_(entry.args()),
        state_(state),
        b_(args),
        sizes_(a_.sizes),
        pieces_(context, (a_.columns() + kNormFnStrip - 1) / kNormFnStrip, 1),
        token_pieces_(context, a_.sizes.tokens, kLeastTokens) {
    const int64_t tokens = sizes_.tokens;
    const int64_t n = sizes_.streams;
    const int64_t chunks = chunks_of_tokens(tokens);
    of_collapse_ = b_.grad_earlier_pre.data != nullptr
                       ? b_.grad_earlier_pre
                       : Coefficients{workspace.take<float>(tokens * n), n, 0};
    grad_mixes_ = {workspace.take<float>(tokens * a_.mixes), a_.mixes, 0};
    grad_mul_ = {workspace.take<float>(tokens * a_.mixes), 0, a_.mixes, 0};
    grad_sqr_ = {workspace.take<float>(tokens), 0, 1, 0};
    scale_ = workspace.take<float>(chunks * kScales);
    base_ = workspace.take<float>(chunks * a_.mixes);
    if (!a_.is_head) grad_logits_ = {workspace.take<float>(tokens * n * n), n * n, n};
    zeros_count_ = std::max(sizes_.hidden, n * n);
    zeros_ = workspace.take<float>(zeros_count_);
    if (b_.grad_layer_input.data == nullptr) b_.grad_layer_input = {zeros_};
    if (b_.grad_pre.data == nullptr) b_.grad_pre = {zeros_};
    if (b_.grad_post.data == nullptr) b_.grad_post = {zeros_};
    if (b_.grad_comb.data == nullptr) b_.grad_comb = {zeros_, 0, n};
    if (a_.has_layer_norm()) {
      row_ = take_rows(workspace, sizes_, 1, sizes_.activation);
      grad_row_ = b_.chain ? GradientRows{row_, false}
                           : GradientRows{take_rows(workspace, sizes_, 1, DType::f32), true};
      // On a device also two sums of every token.
      layer_norm_ =
          workspace.take<float>(chunks * sizes_.hidden + (Kernels::kIsDevice ? 2 * tokens : 0));
    } else {
      grad_row_ = {b_.grad_layer_input, false};
    }
    if (a_.is_broadcast) row_factor_ = {workspace.take<float>(tokens), 1, 0};
    if (has_own_fn_gradient()) {
      grad_factors_ = {workspace.take<float>(a_.mixes * a_.columns()), a_.columns()};
    }
    if (b_.in_blocks) take_blocks(workspace);
    if (Kernels::kIsDevice) return;
    scratch_ = workspace.take<float>(std::max(pieces_.count, token_pieces_.count) *
                                     norm_fn_scratch_floats(a_.mixes));
  }

  // After entry.prepare(), with the state there.
  void run() const {
    coefficients_back();
    NormFnBackwardArgs args = projection();
    args.grad_residual = {b_.grad_out};
    args.grad_fn = grad_factors();
    project_back(args);
    parameters_back();
  }

  // use(gradients, begin, end) gets the gradient of the streams of a block of tokens on the thread
  // that made it, so that it stays in the caches: in A with `chain`, else in F32.
  template <class Use>
  void run_blocks(const Use& use) const {
    coefficients_back();
    token_pieces_.run(context_, [&](int64_t piece, int64_t begin, int64_t end) {
      NormFnBackwardArgs args = projection();
      args.grad_residual = block_of(piece);
      for (int64_t first = begin; first < end; first += block_tokens_) {
        const int64_t last = std::min(end, first + block_tokens_);
        args.grad_residual.first_token = first;
        kernels_.project_bwd(args, {first, last, 0, a_.columns()}, scratch_of(piece));
        use(args.grad_residual, first, last);
      }
    });
    NormFnBackwardArgs args = projection();
    args.grad_fn = grad_factors();
    project_back(args);
    parameters_back();
  }

 private:
  static constexpr int64_t kScales = 3;
  static constexpr int64_t kLeastTokens = 4;  // of a thread

  // Room for a block of tokens of every piece: as many as a second-level cache holds, if these are
  // enough to make up for reading all of fn; of a device half of it.
  void take_blocks(Workspace& workspace) {
    constexpr int64_t kBytes = int64_t{Kernels::kIsDevice ? 32 : 2} << 20;
    constexpr int64_t kLeast = Kernels::kIsDevice ? 128 : kNormFnTokens / 2;
    const DType type = b_.chain ? sizes_.activation : DType::f32;
    const int64_t row = a_.columns() * static_cast<int64_t>(size_of(type));
    block_tokens_ = std::clamp(kBytes / row / kLeast * kLeast, kLeast, 8 * kLeast);
    block_tokens_ = std::clamp<int64_t>(token_pieces_.longest(), 1, block_tokens_);
    block_bytes_ = block_tokens_ * row;
    StreamSizes of_blocks = sizes_;
    of_blocks.tokens = token_pieces_.count * block_tokens_;
    block_ = take_rows(workspace, of_blocks, sizes_.streams, type);
  }
  [[nodiscard]] GradientRows block_of(int64_t piece) const {
    StreamRows rows = block_;
    rows.data = static_cast<char*>(rows.data) + piece * block_bytes_;
    return {rows, !b_.chain};
  }
  [[nodiscard]] float* scratch_of(int64_t piece) const {
    return scratch_ + piece * norm_fn_scratch_floats(a_.mixes);
  }

  void coefficients_back() const {
    const int64_t tokens = sizes_.tokens;
    if constexpr (Kernels::kIsDevice) {  // all chunks together
      fill_zeros_cuda(zeros_, zeros_count_, kernels_.device, kernels_.stream);
      if (tokens > 0) {
        collapse_back(0, 0, tokens);
        coefficients_back(0, 0, tokens);
      }
    } else {
      std::fill_n(zeros_, zeros_count_, 0.0F);
      parallel_chunks(context_, tokens, tokens_of_chunk(tokens),
                      [&](int64_t chunk, int64_t begin, int64_t end) {
                        collapse_back(chunk, begin, end);
                        coefficients_back(chunk, begin, end);
                      });
    }
    const int64_t scales = a_.is_head ? 1 : kScales;
    add(scales, Kernels::kIsDevice ? scales : kScales, scale_, b_.parameters.scale);
    add(a_.mixes, a_.mixes, base_, b_.parameters.base);
    if (a_.has_layer_norm())
      add(sizes_.hidden, sizes_.hidden, layer_norm_, b_.parameters.layer_norm_weight);
  }

  // Of fn and its norm weight, from the gradient of the factors.
  void parameters_back() const {
    if (a_.is_broadcast) {
      spread_fn_gradient();
    } else if (has_own_fn_gradient()) {
      parallel_for(context_, a_.columns(), 32768 / a_.mixes, [&](int64_t begin, int64_t end) {
        kernels_.merge_bwd(merge_args(0), begin, end);
      });
    }
  }

  // Is what the product gives back not yet the gradient of fn?
  [[nodiscard]] bool has_own_fn_gradient() const {
    return a_.is_broadcast || a_.norm_weight != nullptr;
  }
  [[nodiscard]] const Coefficients& pre() const {
    return b_.collapse == Collapse::earlier ? b_.earlier_pre : state_.pre;
  }

  void collapse_back(int64_t chunk, int64_t begin, int64_t end) const {
    if (a_.has_layer_norm()) normalise_back(chunk, begin, end);
    if (b_.collapse == Collapse::first) return;
    kernels_.grad_pre({sizes_, grad_row_, a_.streams, of_collapse_}, begin, end);
  }

  void normalise_back(int64_t chunk, int64_t begin, int64_t end) const {
    StreamRows row = row_;
    if (b_.collapse == Collapse::first) {
      row = a_.streams;
    } else {
      kernels_.collapse({sizes_, a_.streams, pre(), row_}, Tile{begin, end, 0, sizes_.hidden});
    }
    kernels_.normalise_bwd({.sizes = sizes_,
                            .rows = row,
                            .grad = b_.grad_layer_input,
                            .weight_type = a_.layer_norm_type,
                            .weight = a_.layer_norm_weight,
                            .eps = a_.layer_norm_eps,
                            .grad_rows = grad_row_},
                           begin, end, layer_norm_ + chunk * sizes_.hidden);
  }

  // The gradient of the mix that these streams make.
  [[nodiscard]] Coefficients grad_own_pre(int64_t begin, int64_t end) const {
    if (b_.collapse != Collapse::own) return b_.grad_pre;
    if (b_.grad_pre.data == zeros_) return of_collapse_;
    if constexpr (Kernels::kIsDevice) {
      add_coefficients_cuda(b_.grad_pre, of_collapse_, end, sizes_.streams, kernels_.device,
                            kernels_.stream);
      return of_collapse_;
    }
    for (int64_t t = begin; t < end; ++t) {
      const float* given = b_.grad_pre.data + t * b_.grad_pre.token_stride;
      float* sum = of_collapse_.data + t * of_collapse_.token_stride;
      for (int64_t i = 0; i < sizes_.streams; ++i) sum[i] += given[i];
    }
    return of_collapse_;
  }

  void coefficients_back(int64_t chunk, int64_t begin, int64_t end) const {
    const Coefficients grad_pre = grad_own_pre(begin, end);
    float* scale = scale_ + chunk * kScales;
    float* base = base_ + chunk * a_.mixes;
    if (a_.is_head) {
      kernels_.head_mix_bwd({.streams = sizes_.streams,
                             .grad_pre = grad_pre,
                             .mixes = state_.mixes,
                             .scale = a_.scale,
                             .base = a_.base,
                             .grad_mixes = grad_mixes_},
                            begin, end, scale, base);
    } else {
      kernels_.sinkhorn_bwd({a_.sinkhorn, b_.grad_comb, state_.comb_logits, grad_logits_}, begin,
                            end);
      kernels_.split_bwd({.streams = sizes_.streams,
                          .grad_pre = grad_pre,
                          .grad_post = b_.grad_post,
                          .grad_comb_logits = grad_logits_,
                          .mixes = state_.mixes,
                          .scale = a_.scale,
                          .base = a_.base,
                          .post_mult = a_.post_mult,
                          .grad_mixes = grad_mixes_},
                         {scale, base}, begin, end);
    }
    kernels_.reduce_bwd({.groups = 1,
                         .mixes = a_.mixes,
                         .rms = a_.rms,
                         .grad_mixed = {grad_mixes_.data, 0, grad_mixes_.token_stride, 0},
                         .mul = state_.mul,
                         .sqr = state_.sqr,
                         .grad_mul = grad_mul_,
                         .grad_sqr = grad_sqr_},
                        begin, end);
    if (!a_.is_broadcast) return;
    if constexpr (Kernels::kIsDevice) {
      const bool is_own = b_.collapse == Collapse::own;
      sum_coefficients_cuda(is_own ? state_.pre : Coefficients{}, row_factor_, end, sizes_.streams,
                            kernels_.device, kernels_.stream);
      return;
    }
    for (int64_t t = begin; t < end; ++t) {
      float sum = 1;
      if (b_.collapse == Collapse::own) {
        const float* pre = state_.pre.data + t * state_.pre.token_stride;
        sum = 0;
        for (int64_t i = 0; i < sizes_.streams; ++i) sum += pre[i];
      }
      row_factor_.data[t] = sum;
    }
  }

  // Partials F32[P,width], `stride` apart.
  void add(int64_t width, int64_t stride, const float* partial, const VectorGradient& g) const {
    kernels_.add_partials(
        {chunks_of_tokens(sizes_.tokens), width, partial, stride, g.target, g.gradient});
  }

  // The product backwards, without its outputs.
  [[nodiscard]] NormFnBackwardArgs projection() const {
    return {.sizes = a_.projected(),
            .mixes = a_.mixes,
            .groups = 1,
            .grad_mul = grad_mul_,
            .grad_sqr = grad_sqr_,
            .residual = a_.streams,
            .fn = entry_.factors(),
            .tf32 = a_.tf32,
            .grad_residual_acc = b_.grad_streams,
            .grad_fn_acc = has_own_fn_gradient() ? MixRows{} : b_.parameters.fn_target,
            .grad_residual = {},
            .grad_fn = {},
            .streaming = !b_.in_blocks && b_.grad_out.data != b_.grad_streams.data &&
                         exceeds_cache(sizes_, 3 * sizes_.streams),
            .targets = a_.is_broadcast ? sizes_.streams : 1,
            .grad_row = grad_row_,
            .row_factor = a_.is_broadcast ? row_factor_ : pre(),
            .rounds_target = b_.chain};
  }
  [[nodiscard]] MixRows grad_factors() const {
    return has_own_fn_gradient() ? grad_factors_ : b_.parameters.fn;
  }
  void project_back(const NormFnBackwardArgs& args) const {
    pieces_.run(context_, [&](int64_t piece, int64_t begin, int64_t end) {
      const Tile tile = {0, sizes_.tokens, begin * kNormFnStrip,
                         std::min(a_.columns(), end * kNormFnStrip)};
      kernels_.project_bwd(args, tile, scratch_of(piece));
    });
  }

  // From the gradient of the merged fn, whose columns start at `column` of fn.
  [[nodiscard]] MergeBackwardArgs merge_args(int64_t column) const {
    const ParameterGradients& p = b_.parameters;
    const auto from = [&](const MixRows& rows) {
      return rows.data == nullptr ? rows : MixRows{rows.data + column, rows.stride};
    };
    return {.mixes = a_.mixes,
            .grad_merged = grad_factors_,
            .fn = from(a_.fn),
            .norm_weight = a_.norm_weight + column,
            .grad_fn_acc = from(p.fn_target),
            .grad_weight_acc =
                p.norm_weight.target == nullptr ? nullptr : p.norm_weight.target + column,
            .grad_fn = from(p.fn),
            .grad_weight = p.norm_weight.gradient + column};
  }

  // Every part of a fn that was summed over its streams has the gradient of the sum.
  void spread_fn_gradient() const {
    const int64_t d = sizes_.hidden;
    parallel_for(context_, sizes_.streams, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (a_.norm_weight != nullptr) {
          kernels_.merge_bwd(merge_args(i * d), 0, d);
        } else {
          copy_fn_gradient(i * d);
        }
      }
    });
  }
  void copy_fn_gradient(int64_t column) const {
    const ParameterGradients& p = b_.parameters;
    const MixRows to = {p.fn.data + column, p.fn.stride};
    MixRows target = p.fn_target;
    if (target.data != nullptr) target.data += column;
    if constexpr (Kernels::kIsDevice) {
      copy_rows_cuda(grad_factors_, target, to, a_.mixes, sizes_.hidden, kernels_.device,
                     kernels_.stream);
      return;
    }
    for (int64_t j = 0; j < a_.mixes; ++j) {
      const float* sum = grad_factors_.data + j * grad_factors_.stride;
      const float* before = target.data == nullptr ? nullptr : target.data + j * target.stride;
      float* row = to.data + j * to.stride;
      for (int64_t c = 0; c < sizes_.hidden; ++c) {
        row[c] = before == nullptr ? sum[c] : before[c] + sum[c];
      }
    }
  }

  Context& context_;
  const Kernels& kernels_;
  const Entry<Kernels>& entry_;
  const EntryArgs& a_;
  EntryState state_;
  EntryBackwardArgs b_;
  StreamSizes sizes_;
  Pieces pieces_;           // strips of columns, over all tokens
  Pieces token_pieces_;     // tokens, over all columns
  float* zeros_ = nullptr;  // one row of any upstream gradient
  int64_t zeros_count_ = 0;
  Coefficients of_collapse_;                    // F32[T,n]
  Coefficients grad_logits_;                    // F32[T,n,n]
  Coefficients grad_mixes_;                     // F32[T,N]
  GroupRows grad_mul_, grad_sqr_;               // F32[T,N], F32[T]
  float* scale_ = nullptr;                      // F32[P,3]
  float* base_ = nullptr;                       // F32[P,N]
  StreamRows row_;                              // A[T,d]: the collapsed row before its norm
  GradientRows grad_row_;                       // [T,d]: its gradient
  float* layer_norm_ = nullptr;                 // F32[P,d]
  Coefficients row_factor_;                     // F32[T]: how often that goes into the streams
  MixRows grad_factors_;                        // F32[N,K], of a summed fn F32[N,d]
  StreamRows block_;                            // A or F32[tokens,n,d]: blocks of grad_out
  int64_t block_tokens_ = 0, block_bytes_ = 0;  // of a piece
  float* scratch_ = nullptr;                    // of every piece
};

}  // namespace ehc::mhc
