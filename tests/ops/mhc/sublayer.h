// What the tests of the entry of a sublayer, the head and the seams share: parameters, and the
// entry made of the operators that it stands for.
#pragma once

#include "ehc/mhc.h"
#include "tests/ops/mhc/support.h"

namespace ehc::mhc::test {

using ehc::test::Array;
using ehc::test::context_for;
using ehc::test::StreamShape;
using ehc::test::workspace_for;

// Of the parts of an entry only the projection has a kernel of "cpu.amx"; there the others are
// those of "cpu.avx512bf16".
template <class P>
std::string implementation_of(const std::string& entry) {
  constexpr bool kProjects = std::is_same_v<P, PrenormGemm> || requires(P p) { p.weights; };
  return entry == "cpu.amx" && !kProjects ? "cpu.avx512bf16" : entry;
}

template <class P>
void run(const std::string& impl, void (*op)(Context&, const P&), const P& p, int threads = 1) {
  Context context = context_for(implementation_of<P>(impl), threads);
  const Buffer workspace = workspace_for(context, p);
  op(context, p);
}

inline MixRules rules_of_tests() {
  return {.norm_eps = 1e-5, .pre_eps = 1e-2, .post_mult = 2, .repeat = 6, .sinkhorn_eps = 1e-4};
}

struct EntryShape {
  StreamShape s;
  bool has_norm_weight = true;
  bool has_layer_norm = false;
};
inline std::ostream& operator<<(std::ostream& out, const EntryShape& e) {
  return out << e.s << (e.has_norm_weight ? " norm_weight" : "")
             << (e.has_layer_norm ? " layer_norm_weight" : "");
}

// Every edge of T, n and d in some combination, each edge where the rest is small: several blocks
// of tokens forwards (over 64) and backwards (over 192 of a thread), splits and runs of columns.
inline std::vector<EntryShape> entry_shapes() {
  std::vector<EntryShape> list;
  const int64_t tokens[] = {200, 5, 70, 33, 2, 3, 1, 2};
  const int64_t widths[] = {96, 1300, 33, 65, 31, 7, 40, 1};
  const DType types[] = {DType::bf16, DType::f32, DType::f16};
  for (int64_t n = 1; n <= 8; ++n) {
    list.push_back({{tokens[n - 1], n, widths[n - 1], types[n % 3]}, n % 2 == 0, n % 3 == 1});
  }
  list.push_back({{7, 4, 300, DType::bf16}, true, true});
  list.push_back({{9, 4, 64, DType::f32}, false, false});
  return list;
}

// Parameters of an entry; `mixes` is N, or n for the head.
struct Parameters {
  Array fn, scale, base, norm_weight, layer_norm_weight;
  bool has_norm_weight, has_layer_norm;

  Parameters(const EntryShape& e, int64_t mixes, int64_t scales, uint32_t seed = 100)
      : has_norm_weight(e.has_norm_weight), has_layer_norm(e.has_layer_norm) {
    const int64_t columns = e.s.n * e.s.d;
    const float spread = 1 / std::sqrt(static_cast<float>(columns));
    fn = Array::random(DType::f32, {mixes, columns}, seed, 0, spread);
    scale = Array::random(DType::f32, {scales}, seed + 1, 1, 0.3F);
    base = Array::random(DType::f32, {mixes}, seed + 2);
    norm_weight = Array::random(DType::f32, {columns}, seed + 3, 1, 0.3F);
    layer_norm_weight = Array::random(DType::bf16, {e.s.d}, seed + 4, 1, 0.3F);
  }
  [[nodiscard]] MixWeights weights() const {
    return {fn, scale, base, has_norm_weight ? norm_weight.view() : Tensor()};
  }
  [[nodiscard]] Tensor layer_norm() const {
    return has_layer_norm ? layer_norm_weight.view() : Tensor();
  }
};

inline Parameters sublayer_parameters(const EntryShape& e) {
  return {e, e.s.n * e.s.n + 2 * e.s.n, 3};
}

// Gradients of the parameters, or targets for them.
struct Gradients {
  Array fn, scale, base, norm_weight, layer_norm_weight;
  bool has_norm_weight, has_layer_norm;

  // `seed` 0: zeros.
  Gradients(const Parameters& p, uint32_t seed)
      : has_norm_weight(p.has_norm_weight), has_layer_norm(p.has_layer_norm) {
    const auto like = [&](const Array& a, uint32_t k) {
      const Tensor t = a.view();
      const std::vector<int64_t> shape(t.shape, t.shape + t.rank);
      return seed == 0 ? Array(DType::f32, shape) : Array::random(DType::f32, shape, seed + k);
    };
    fn = like(p.fn, 0);
    scale = like(p.scale, 1);
    base = like(p.base, 2);
    norm_weight = like(p.norm_weight, 3);
    layer_norm_weight = like(p.layer_norm_weight, 4);
  }
  [[nodiscard]] MixGradients tensors() const {
    return {fn, scale, base, has_norm_weight ? norm_weight.view() : Tensor()};
  }
  [[nodiscard]] Tensor layer_norm() const {
    return has_layer_norm ? layer_norm_weight.view() : Tensor();
  }
  [[nodiscard]] std::string bits() const {
    return fn.bits() + scale.bits() + base.bits() + norm_weight.bits() + layer_norm_weight.bits();
  }
  // Those of the parameters that there are.
  [[nodiscard]] std::vector<const Array*> present() const {
    std::vector<const Array*> list = {&fn, &scale, &base};
    if (has_norm_weight) list.push_back(&norm_weight);
    if (has_layer_norm) list.push_back(&layer_norm_weight);
    return list;
  }
};

// beta = 1: `sums` = targets + written, each within a few roundings of its largest element.
inline void expect_added(const Gradients& sums, const Gradients& targets,
                         const Gradients& written) {
  for (size_t k = 0; k < sums.present().size(); ++k) {
    const Array& sum = *sums.present()[k];
    double largest = 0;
    for (int64_t i = 0; i < sum.size(); ++i) {
      largest = std::max(largest, std::fabs(static_cast<double>(written.present()[k]->get(i))));
    }
    EXPECT_GT(largest, 0) << "gradient " << k;
    for (int64_t i = 0; i < sum.size(); ++i) {
      const double expected =
          static_cast<double>(targets.present()[k]->get(i)) + written.present()[k]->get(i);
      EXPECT_NEAR(sum.get(i), expected, 1e-6 * (largest + std::fabs(expected)))
          << "gradient " << k << " " << i;
    }
  }
}

// What an entry makes.
struct Entry {
  Array layer_input, post, pre, mixes, mul, sqr, comb_logits, comb;

  explicit Entry(const StreamShape& s) {
    const int64_t mix_count = s.n * s.n + 2 * s.n;
    layer_input = Array(s.type, {s.T, s.d});
    post = Array(DType::f32, {s.T, s.n});
    pre = Array(DType::f32, {s.T, s.n});
    mixes = Array(DType::f32, {s.T, mix_count});
    mul = Array(DType::f32, {s.T, mix_count});
    sqr = Array(DType::f32, {s.T});
    comb_logits = Array(DType::f32, {s.T, s.n, s.n});
    comb = Array(DType::f32, {s.T, s.n, s.n});
  }
  [[nodiscard]] MixState state() const { return {pre, mixes, mul, sqr, comb_logits, comb}; }
  [[nodiscard]] std::string bits() const {
    return layer_input.bits() + post.bits() + pre.bits() + mixes.bits() + mul.bits() + sqr.bits() +
           comb_logits.bits() + comb.bits();
  }
};

// The merged fn, or fn itself.
inline Array merged_fn(const std::string& impl, const Parameters& p) {
  if (!p.has_norm_weight) return p.fn.copy();
  const Tensor t = p.fn.view();
  Array merged(DType::f32, {t.shape[0], t.shape[1]});
  run(impl, &merge_fwd, {.fn = p.fn, .norm_weight = p.norm_weight, .fn_merged = merged});
  return merged;
}

// The entry, operator by operator. `streams` A[T,n,d]; fn F32[N,K] is merged.
inline void entry_by_parts(const std::string& impl, const Parameters& p, const Array& fn,
                           const Tensor& streams, Entry& e) {
  const MixRules rules = rules_of_tests();
  const int64_t tokens = streams.shape[0];
  const int64_t columns = streams.shape[1] * streams.shape[2];
  const int64_t splits = prenorm_splits(tokens, columns);
  const int64_t mixes = fn.view().shape[0];
  const Array mul(DType::f32, {splits, tokens, mixes});
  const Array sqr(DType::f32, {splits, tokens});
  run(impl, &prenorm_gemm, {.residual = streams, .fn = fn, .mul_partial = mul, .sqr_partial = sqr});
  run(impl, &reduce_partials_fwd,
      {.mul_partial = mul,
       .sqr_partial = sqr,
       .mixes = e.mixes,
       .mul = e.mul,
       .sqr = e.sqr,
       .k = columns,
       .norm_eps = rules.norm_eps});
  run(impl, &split_fwd,
      {.mixes = e.mixes,
       .scale = p.scale,
       .base = p.base,
       .pre = e.pre,
       .post = e.post,
       .comb_logits = e.comb_logits,
       .pre_eps = rules.pre_eps,
       .post_mult = rules.post_mult});
  run(impl, &sinkhorn_fwd,
      {.comb_logits = e.comb_logits,
       .comb = e.comb,
       .repeat = rules.repeat,
       .eps = rules.sinkhorn_eps});
}

// Upstream gradients of an entry; an absent one has no elements.
struct Upstream {
  Array streams, layer_input, pre, post, comb;

  Upstream(const StreamShape& s, uint32_t seed) {
    streams = Array::random(s.type, {s.T, s.n, s.d}, seed);
    layer_input = Array::random(s.type, {s.T, s.d}, seed + 1);
    pre = Array::random(DType::f32, {s.T, s.n}, seed + 2);
    post = Array::random(DType::f32, {s.T, s.n}, seed + 3);
    comb = Array::random(DType::f32, {s.T, s.n, s.n}, seed + 4);
  }
};

// The backward of an entry without layer norm, operator by operator, with their roundings.
// earlier_pre: the mix of the collapse; null: the entry's own. grad_pre of that mix comes back in
// `of_pre`.
inline void entry_bwd_by_parts(const std::string& impl, const Parameters& p, const Tensor& streams,
                               const Entry& e, const Upstream& up, const Tensor& earlier_pre,
                               const Gradients& targets, const Array& grad_streams,
                               const Array& of_pre, const Gradients& g) {
  const MixRules rules = rules_of_tests();
  const int64_t tokens = streams.shape[0];
  const int64_t n = streams.shape[1];
  const int64_t mixes = n * n + 2 * n;
  run(impl, &pre_apply_bwd,
      {.grad_layer_input = up.layer_input,
       .residual = streams,
       .pre = earlier_pre ? earlier_pre : e.pre.view(),
       .grad_residual_acc = up.streams,
       .grad_residual = grad_streams,
       .grad_pre = of_pre});
  const Array logits(DType::f32, {tokens, n, n});
  run(impl, &sinkhorn_bwd,
      {.grad_comb = up.comb,
       .comb_logits = e.comb_logits,
       .grad_comb_logits = logits,
       .repeat = rules.repeat,
       .eps = rules.sinkhorn_eps});
  const int64_t partials = split_partials(tokens);
  const Array grad_mixes(DType::f32, {tokens, mixes});
  const Array scale(DType::f32, {partials, 3});
  const Array base(DType::f32, {partials, mixes});
  run(impl, &split_bwd,
      {.grad_pre = earlier_pre ? up.pre.view() : of_pre.view(),
       .grad_post = up.post,
       .grad_comb_logits = logits,
       .mixes = e.mixes,
       .scale = p.scale,
       .base = p.base,
       .grad_mixes = grad_mixes,
       .grad_scale_partial = scale,
       .grad_base_partial = base,
       .post_mult = rules.post_mult});
  run(impl, &split_bwd_reduce,
      {.grad_scale_partial = scale,
       .grad_base_partial = base,
       .grad_scale_acc = targets.scale,
       .grad_base_acc = targets.base,
       .grad_scale = g.scale,
       .grad_base = g.base});
  const Array grad_mul(DType::f32, {tokens, mixes});
  const Array grad_sqr(DType::f32, {tokens});
  run(impl, &reduce_partials_bwd,
      {.grad_mixes = grad_mixes,
       .mul = e.mul,
       .sqr = e.sqr,
       .grad_mul = grad_mul,
       .grad_sqr = grad_sqr,
       .k = n * streams.shape[2],
       .norm_eps = rules.norm_eps});
  const Array fn = merged_fn(impl, p);
  const Array grad_merged(DType::f32, {mixes, n * streams.shape[2]});
  run(impl, &norm_fn_bwd,
      {.grad_mul = grad_mul,
       .grad_sqr = grad_sqr,
       .residual = streams,
       .fn = fn,
       .grad_residual_acc = grad_streams,
       .grad_fn_acc = p.has_norm_weight ? Tensor() : targets.fn.view(),
       .grad_residual = grad_streams,
       .grad_fn = p.has_norm_weight ? grad_merged : g.fn.view()});
  if (!p.has_norm_weight) return;
  run(impl, &merge_bwd,
      {.grad_fn_merged = grad_merged,
       .fn = p.fn,
       .norm_weight = p.norm_weight,
       .grad_fn_acc = targets.fn,
       .grad_norm_weight_acc = targets.norm_weight,
       .grad_fn = g.fn,
       .grad_norm_weight = g.norm_weight});
}

// d loss / d input by central differences with two steps, extrapolated, of outputs in F32.
template <class Loss>
void expect_gradient(Array& input, const Tensor& gradient, const Loss& loss,
                     const std::string& what) {
  ASSERT_EQ(gradient.numel(), input.size()) << what;
  const auto slope = [&](int64_t i, float h) {
    const float x = input.get(i);
    input.set(i, x + h);
    const double above = loss();
    input.set(i, x - h);
    const double below = loss();
    input.set(i, x);
    return (above - below) / (2.0 * h);
  };
  for (int64_t i = 0; i < input.size(); ++i) {
    const double coarse = slope(i, 0x1p-5F);
    const double fine = slope(i, 0x1p-6F);
    const double expected = fine + (fine - coarse) / 3;
    EXPECT_NEAR(gradient.as<float>()[i], expected, 2e-3 * std::max(1.0, std::abs(expected)))
        << what << " " << i;
  }
}

}  // namespace ehc::mhc::test
