// The entry of a sublayer forwards, from streams to coefficients and layer input, with the kernels
// of the operators that it stands for; also the head, and the first entry of a stack, whose streams
// are all one row.
#pragma once

#include <algorithm>

#include "core/workspace.h"
#include "ehc/mhc/sublayer.h"
#include "ops/mhc/seam/seam_args.h"
#include "ops/mhc/shared/device_kernels.h"
#include "ops/mhc/shared/group_call.h"
#include "ops/mhc/shared/sinkhorn_call.h"
#include "ops/mhc/shared/stream_call.h"
#include "ops/mhc/shared/sublayer_kernels.h"

namespace ehc::mhc {

// Arguments of an entry.
struct EntryArgs {
  StreamSizes sizes;
  StreamRows streams;                  // A[T,n,d], with a stream stride of 0 where all are one row
  bool is_broadcast = false;           // they are: then fn is summed over its n parts
  bool is_head = false;                // n mixes and no comb
  int64_t mixes = 0;                   // N, of the head n
  MixRows fn;                          // F32[N,K]
  const float* scale = nullptr;        // F32[3], of the head F32[1]
  const float* base = nullptr;         // F32[N]
  const float* norm_weight = nullptr;  // F32[K], or null
  Rms rms;
  bool tf32 = false;
  float pre_eps = 0, post_mult = 0;
  SinkhornRule sinkhorn;
  DType layer_norm_type = DType::none;
  const void* layer_norm_weight = nullptr;  // W[d], or null
  float layer_norm_eps = 0;

  // What the projection sees.
  [[nodiscard]] StreamSizes projected() const {
    return {sizes.tokens, is_broadcast ? 1 : sizes.streams, sizes.hidden, sizes.activation};
  }
  [[nodiscard]] int64_t all_columns() const { return sizes.streams * sizes.hidden; }
  [[nodiscard]] int64_t columns() const { return is_broadcast ? sizes.hidden : all_columns(); }
  [[nodiscard]] bool has_layer_norm() const { return layer_norm_type != DType::none; }
};

template <class P>
void set_projection(const P& p, EntryArgs& a) {
  a.fn = mix_rows(p.weights.fn);
  a.scale = p.weights.scale.template as<float>();
  a.base = p.weights.base.template as<float>();
  a.norm_weight = p.weights.norm_weight.template as<float>();
  a.tf32 = p.precision == Precision::tf32;
}

template <class P>
EntryArgs entry_args(const P& p, const Bound& bound, const StreamRows& streams,
                     bool is_broadcast = false) {
  EntryArgs a;
  a.sizes = stream_sizes(bound);
  a.streams = streams;
  a.is_broadcast = is_broadcast;
  a.mixes = bound["N"];
  set_projection(p, a);
  a.rms = rms_of(p.rules, a.columns());
  a.pre_eps = static_cast<float>(*p.rules.pre_eps);
  a.post_mult = static_cast<float>(*p.rules.post_mult);
  a.sinkhorn =
      sinkhorn_rule(a.sizes.streams, *p.rules.repeat, *p.rules.sinkhorn_eps, p.rules.convention);
  if (!p.layer_norm_weight) return a;
  a.layer_norm_type = p.layer_norm_weight.dtype;
  a.layer_norm_weight = p.layer_norm_weight.data;
  a.layer_norm_eps = static_cast<float>(*p.layer_norm_eps);
  return a;
}

template <class P>
EntryArgs head_args(const P& p, const Bound& bound) {
  EntryArgs a;
  a.sizes = stream_sizes(bound);
  a.streams = stream_rows(p.residual);
  a.is_head = true;
  a.mixes = a.sizes.streams;
  set_projection(p, a);
  a.rms = rms_of(p, a.columns());
  a.pre_eps = static_cast<float>(*p.pre_eps);
  return a;
}

// What the entry makes of a token, wherever it is kept. Null data: not wanted.
struct EntryState {
  Coefficients pre, post, mixes, comb_logits, comb;
  GroupRows mul, sqr;
};

// A tensor, or an array of the workspace in its place.
inline Coefficients rows_of(const Tensor& t, Workspace& workspace, int64_t tokens, int64_t width,
                            int64_t row_stride = 0) {
  if (t) return coefficients(t);
  return {workspace.take<float>(tokens * width), width, row_stride};
}
inline GroupRows sums_of(const Tensor& t, Workspace& workspace, int64_t tokens, int64_t width) {
  if (t) return {t.as<float>(), 0, t.stride[0], 0};
  return {workspace.take<float>(tokens * width), 0, width, 0};
}

// The coefficients in the tensors that are there. The rest in the workspace; mul and sqr, which
// only a backward wants, with `for_backward`.
inline EntryState entry_state(const EntryArgs& a, const MixState& tensors, const Tensor& post,
                              bool for_backward, Workspace& workspace) {
  const int64_t tokens = a.sizes.tokens;
  const int64_t n = a.sizes.streams;
  EntryState s;
  s.pre = rows_of(tensors.pre, workspace, tokens, n);
  s.mixes = rows_of(tensors.mixes, workspace, tokens, a.mixes);
  if (tensors.mul || for_backward) {
    s.mul = sums_of(tensors.mul, workspace, tokens, a.mixes);
    s.sqr = sums_of(tensors.sqr, workspace, tokens, 1);
  }
  if (a.is_head) return s;
  s.post = rows_of(post, workspace, tokens, n);
  s.comb_logits = rows_of(tensors.comb_logits, workspace, tokens, n * n, n);
  s.comb = coefficients(tensors.comb);
  return s;
}

// Rows of A or F32 in the workspace: [T,rows,d].
inline StreamRows take_rows(Workspace& workspace, const StreamSizes& sizes, int64_t rows,
                            DType type) {
  const int64_t bytes = sizes.tokens * rows * sizes.hidden * static_cast<int64_t>(size_of(type));
  return {workspace.take<char>(bytes), rows * sizes.hidden, sizes.hidden};
}

// With SublayerKernels or DeviceKernels.
template <class Kernels>
class Entry {
 public:
  // Takes its arrays from the workspace and looks at no tensor.
  Entry(Context& context, const Kernels& kernels, const EntryArgs& args, Workspace& workspace)
      : context_(context),
        kernels_(kernels),
        a_(args),
        // A device cuts the sums itself; the tree, and so the bits, are the same.
        splits_(Kernels::kIsDevice ? 1 : automatic_splits(args.sizes.tokens, args.columns())),
        merged_(args.norm_weight != nullptr ? workspace.take<float>(args.mixes * args.all_columns())
                                            : nullptr),
        summed_(args.is_broadcast ? workspace.take<float>(args.mixes * args.columns()) : nullptr),
        mul_(workspace.take<float>(splits_ * args.sizes.tokens * args.mixes)),
        sqr_(workspace.take<float>(splits_ * args.sizes.tokens)) {
    if constexpr (Kernels::kIsDevice) {
      device_scratch_ =
          workspace.take<char>(static_cast<int64_t>(prenorm_gemm_cuda_workspace(product())));
      return;
    }
    pieces_ = is_short() ? Pieces(context, splits_, 1) : Pieces(context, blocks(), 1);
    const int64_t at_once = is_short() ? std::min(kPrenormTokens, args.sizes.tokens) : kBlock;
    scratch_floats_ = prenorm_scratch(product(), at_once).total;
    scratch_ = workspace.take<float>(pieces_.count * scratch_floats_);
  }

  [[nodiscard]] const EntryArgs& args() const { return a_; }

  // fn as the product takes it, after `prepare`.
  [[nodiscard]] MixRows factors() const {
    if (a_.is_broadcast) return {summed_, a_.columns()};
    return a_.norm_weight != nullptr ? MixRows{merged_, a_.all_columns()} : a_.fn;
  }

  void prepare() const {
    const int64_t columns = a_.all_columns();
    const MixRows merged = a_.norm_weight != nullptr ? MixRows{merged_, columns} : a_.fn;
    if (a_.norm_weight != nullptr) {
      const MergeForwardArgs merge = {a_.mixes, a_.fn, a_.norm_weight, merged};
      parallel_for(context_, columns, 32768 / a_.mixes,
                   [&](int64_t begin, int64_t end) { kernels_.merge(merge, begin, end); });
    }
    if (!a_.is_broadcast) return;
    const FnSumArgs sum = {a_.sizes.streams, a_.sizes.hidden, merged, factors()};
    if constexpr (Kernels::kIsDevice) {
      kernels_.fn_sum(sum, 0, a_.mixes);
    } else {
      parallel_for(context_, a_.mixes, 1,
                   [&](int64_t begin, int64_t end) { fn_sum_rows(sum, begin, end); });
    }
  }

  // make(tile) writes the streams where the entry reads them, collapse(tile) makes `layer_input`
  // (null data: nothing does) once the coefficients are there. After `prepare`.
  template <class Make, class Collapse>
  void run(const EntryState& state, const StreamRows& layer_input, const Make& make,
           const Collapse& collapse) const {
    if constexpr (Kernels::kIsDevice) {
      run_on_device(state, layer_input, make, collapse);
      return;
    }
    if (is_short()) {
      run_short(state, layer_input, make, collapse);
      return;
    }
    pieces_.run(context_, [&](int64_t piece, int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * kBlock;
        const int64_t last = std::min(a_.sizes.tokens, first + kBlock);
        const Tile tile = {first, last, 0, a_.sizes.hidden};
        make(tile);
        for (int64_t s = 0; s < splits_; ++s) project(s, first, last, piece);
        make_coefficients(state, first, last);
        if (layer_input.data == nullptr) continue;
        collapse(tile);
        normalise(layer_input, first, last);
      }
    });
  }

  // The same on a device where the streams' own mix collapses them and nothing is saved: one kernel
  // behind the projection, same bits.
  template <class Make>
  void run_fused(const EntryState& state, const PreApplyForwardArgs& collapse,
                 const Make& make) const {
    if (a_.sizes.tokens == 0) return;
    make(Tile{0, a_.sizes.tokens, 0, a_.sizes.hidden});
    kernels_.project(product(), device_scratch_);
    BigFuseArgs fused;
    fused.reduce = reduction(state);
    fused.split = splitting(state);
    fused.sinkhorn = a_.sinkhorn;
    fused.comb = state.comb;
    fused.collapse = collapse;
    if (a_.has_layer_norm()) fused.norm = norm_of(collapse.layer_input);
    pre_big_fuse_cuda(fused, kernels_.device, kernels_.stream);
  }

 private:
  // Tokens that go through all steps together, so that their streams stay in a cache.
  static constexpr int64_t kBlock = 64;

  [[nodiscard]] int64_t blocks() const { return (a_.sizes.tokens + kBlock - 1) / kBlock; }
  // Too few tokens for all threads: then these share every step.
  [[nodiscard]] bool is_short() const { return blocks() < context_.executor().concurrency(); }

  template <class Make, class Collapse>
  void run_short(const EntryState& state, const StreamRows& layer_input, const Make& make,
                 const Collapse& collapse) const {
    const StreamSizes& sizes = a_.sizes;
    if (sizes.tokens == 0) return;
    for_each_tile(context_, sizes, make);
    pieces_.run(context_, [&](int64_t piece, int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        for (int64_t t = 0; t < sizes.tokens; t += kPrenormTokens) {
          project(s, t, std::min(sizes.tokens, t + kPrenormTokens), piece);
        }
      }
    });
    parallel_for(context_, sizes.tokens, kBlock,
                 [&](int64_t begin, int64_t end) { make_coefficients(state, begin, end); });
    if (layer_input.data == nullptr) return;
    for_each_tile(context_, sizes, collapse);
    parallel_for(context_, sizes.tokens, 1,
                 [&](int64_t begin, int64_t end) { normalise(layer_input, begin, end); });
  }

  // All tokens go through every step together.
  template <class Make, class Collapse>
  void run_on_device(const EntryState& state, const StreamRows& layer_input, const Make& make,
                     const Collapse& collapse) const {
    const int64_t tokens = a_.sizes.tokens;
    if (tokens == 0) return;
    const Tile all = {0, tokens, 0, a_.sizes.hidden};
    make(all);
    kernels_.project(product(), device_scratch_);
    make_coefficients(state, 0, tokens);
    if (layer_input.data == nullptr) return;
    collapse(all);
    normalise(layer_input, 0, tokens);
  }

  [[nodiscard]] PrenormGemmArgs product() const {
    const int64_t tokens = a_.sizes.tokens;
    return {.sizes = a_.projected(),
            .residual = a_.streams,
            .fn = factors(),
            .mixes = a_.mixes,
            .splits = splits_,
            .tf32 = a_.tf32,
            .mul_partial = {mul_, tokens * a_.mixes, a_.mixes, 0},
            .sqr_partial = {sqr_, tokens, 1, 0}};
  }
  void project(int64_t split, int64_t begin, int64_t end, int64_t piece) const {
    if constexpr (!Kernels::kIsDevice) {
      kernels_.project(product(), split, begin, end, scratch_ + piece * scratch_floats_);
    }
  }

  [[nodiscard]] ReducePartialsForwardArgs reduction(const EntryState& s) const {
    const PrenormGemmArgs sums = product();
    return {.splits = splits_,
            .groups = 1,
            .mixes = a_.mixes,
            .rms = a_.rms,
            .mul_partial = sums.mul_partial,
            .sqr_partial = sums.sqr_partial,
            .mixed = {s.mixes.data, 0, s.mixes.token_stride, 0},
            .mul = s.mul,
            .sqr = s.sqr};
  }
  [[nodiscard]] SplitForwardArgs splitting(const EntryState& s) const {
    return {.streams = a_.sizes.streams,
            .mixes = s.mixes,
            .scale = a_.scale,
            .base = a_.base,
            .pre_eps = a_.pre_eps,
            .post_mult = a_.post_mult,
            .pre = s.pre,
            .post = s.post,
            .comb_logits = s.comb_logits};
  }
  [[nodiscard]] LayerNormArgs norm_of(const StreamRows& layer_input) const {
    return {a_.sizes,           layer_input,          layer_input,
            a_.layer_norm_type, a_.layer_norm_weight, a_.layer_norm_eps};
  }

  void make_coefficients(const EntryState& s, int64_t begin, int64_t end) const {
    kernels_.reduce(reduction(s), begin, end);
    if (a_.is_head) {
      kernels_.head_mix({a_.sizes.streams, s.mixes, a_.scale, a_.base, a_.pre_eps, s.pre}, begin,
                        end);
      return;
    }
    kernels_.split(splitting(s), begin, end);
    if (s.comb.data == nullptr) return;
    kernels_.sinkhorn({a_.sinkhorn, s.comb_logits, s.comb}, begin, end);
  }

  void normalise(const StreamRows& layer_input, int64_t begin, int64_t end) const {
    if (a_.has_layer_norm()) kernels_.normalise(norm_of(layer_input), begin, end);
  }

  Context& context_;
  const Kernels& kernels_;
  EntryArgs a_;
  int64_t splits_;
  float* merged_;  // F32[N,K]
  float* summed_;  // F32[N,d]
  float* mul_;     // F32[S,T,N]
  float* sqr_;     // F32[S,T]
  Pieces pieces_{context_, 0, 1};
  float* scratch_ = nullptr;
  int64_t scratch_floats_ = 0;
  char* device_scratch_ = nullptr;
};

// What needs nothing done before the projection, or after it.
inline constexpr auto kNothing = [](const Tile&) {};

// The streams collapsed with `pre` to `row`.
inline PreApplyForwardArgs collapse_args(const EntryArgs& a, const Coefficients& pre,
                                         const StreamRows& row) {
  return {.sizes = a.sizes,
          .residual = a.streams,
          .pre = pre,
          .layer_input = row,
          .streaming = !a.has_layer_norm() && exceeds_cache(a.sizes, a.sizes.streams + 1)};
}

}  // namespace ehc::mhc
