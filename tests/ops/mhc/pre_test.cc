#include "ehc/mhc/pre.h"

#include "tests/ops/mhc/sublayer.h"

namespace ehc::mhc {
namespace {

using ehc::test::error_of;
using ehc::test::implementations;
using ehc::test::inner_product;
using ehc::test::Layout;
using test::Array;
using test::entry_shapes;
using test::EntryShape;
using test::Gradients;
using test::Parameters;
using test::run;
using test::sublayer_parameters;
using test::Upstream;

// Inputs of both calls and their outputs.
struct Pre {
  EntryShape e;
  Parameters parameters;
  Array residual;
  test::Entry out;
  Upstream up;
  Gradients targets, gradients;
  Array grad_residual;

  explicit Pre(const EntryShape& shape)
      : e(shape),
        parameters(sublayer_parameters(shape)),
        residual(Array::random(e.s.type, {e.s.T, e.s.n, e.s.d}, 1)),
        out(e.s),
        up(e.s, 10),
        targets(parameters, 20),
        gradients(parameters, 0),
        grad_residual(e.s.type, {e.s.T, e.s.n, e.s.d}) {}

  [[nodiscard]] PreForward forward(bool save = true) const {
    PreForward p{.residual = residual,
                 .weights = parameters.weights(),
                 .layer_norm_weight = parameters.layer_norm(),
                 .layer_input = out.layer_input,
                 .post = out.post,
                 .state = save ? out.state() : MixState{.comb = out.comb},
                 .rules = test::rules_of_tests()};
    if (e.has_layer_norm) p.layer_norm_eps = 1e-4;
    return p;
  }
  [[nodiscard]] PreBackward backward(bool saved, Rounding rounding) const {
    PreBackward p{.grad_layer_input = up.layer_input,
                  .grad_post = up.post,
                  .grad_comb = up.comb,
                  .residual = residual,
                  .weights = parameters.weights(),
                  .layer_norm_weight = parameters.layer_norm(),
                  .grad_residual_acc = up.streams,
                  .targets = targets.tensors(),
                  .grad_layer_norm_weight_acc = targets.layer_norm(),
                  .state = saved ? out.state() : MixState{},
                  .grad_residual = grad_residual,
                  .gradients = gradients.tensors(),
                  .grad_layer_norm_weight = gradients.layer_norm(),
                  .rules = test::rules_of_tests(),
                  .rounding = rounding};
    if (e.has_layer_norm) p.layer_norm_eps = 1e-4;
    return p;
  }
  [[nodiscard]] std::string gradient_bits() const {
    return grad_residual.bits() + gradients.bits();
  }
};

TEST(Pre, HasTheBitsOfItsParts) {
  for (const EntryShape& e : entry_shapes()) {
    for (const std::string& impl : implementations("mhc.pre_fwd", e.s.type)) {
      SCOPED_TRACE(::testing::Message() << impl << " " << e);
      const Pre whole(e);
      Pre parts(e);
      run(impl, &pre_fwd, whole.forward(), 3);
      const Array fn = test::merged_fn(impl, parts.parameters);
      test::entry_by_parts(impl, parts.parameters, fn, parts.residual, parts.out);
      run(impl, &pre_apply_fwd,
          {.residual = parts.residual, .pre = parts.out.pre, .layer_input = parts.out.layer_input});
      if (!e.has_layer_norm) {
        EXPECT_EQ(whole.out.bits(), parts.out.bits());
        continue;
      }
      const int64_t splits = prenorm_splits(e.s.T, e.s.n * e.s.d);
      const Array mul(DType::f32, {splits, e.s.T, fn.view().shape[0]});
      const Array sqr(DType::f32, {splits, e.s.T});
      run(impl, &prenorm_gemm,
          {.residual = parts.residual, .fn = fn, .mul_partial = mul, .sqr_partial = sqr});
      const MixRules rules = test::rules_of_tests();
      run(impl, &pre_big_fuse,
          {.mul_partial = mul,
           .sqr_partial = sqr,
           .scale = parts.parameters.scale,
           .base = parts.parameters.base,
           .residual = parts.residual,
           .layer_norm_weight = parts.parameters.layer_norm_weight,
           .layer_input = parts.out.layer_input,
           .post = parts.out.post,
           .comb = parts.out.comb,
           .norm_eps = rules.norm_eps,
           .pre_eps = rules.pre_eps,
           .post_mult = rules.post_mult,
           .repeat = rules.repeat,
           .sinkhorn_eps = rules.sinkhorn_eps,
           .layer_norm_eps = 1e-4});
      EXPECT_EQ(whole.out.bits(), parts.out.bits());
    }
  }
}

TEST(Pre, SavingThreadsAndNeighboursChangeNoBit) {
  for (const EntryShape& e : entry_shapes()) {
    for (const std::string& impl : implementations("mhc.pre_fwd", e.s.type)) {
      if (impl == "reference" || impl == "reference.f32") continue;  // sums follow the splits
      SCOPED_TRACE(::testing::Message() << impl << " " << e);
      const Pre saves(e);
      run(impl, &pre_fwd, saves.forward());
      for (const int threads : {1, 2, 5}) {
        const Pre other(e);
        run(impl, &pre_fwd, other.forward(false), threads);
        EXPECT_EQ(other.out.layer_input.bits() + other.out.post.bits() + other.out.comb.bits(),
                  saves.out.layer_input.bits() + saves.out.post.bits() + saves.out.comb.bits())
            << threads;
      }
      const Pre one(e);
      const int64_t t = e.s.T - 1;
      PreForward p = one.forward(false);
      p.residual = one.residual.rows(t, t + 1);
      p.layer_input = one.out.layer_input.rows(0, 1);
      p.post = one.out.post.rows(0, 1);
      p.state.comb = one.out.comb.rows(0, 1);
      run(impl, &pre_fwd, p);
      EXPECT_EQ(one.out.layer_input.bits(0, 1), saves.out.layer_input.bits(t, t + 1));
      EXPECT_EQ(one.out.comb.bits(0, 1), saves.out.comb.bits(t, t + 1));
    }
  }
}

TEST(PreBackward, ChainHasTheBitsOfItsParts) {
  for (const EntryShape& e : entry_shapes()) {
    if (e.has_layer_norm) continue;
    for (const std::string& impl : implementations("mhc.pre_bwd", e.s.type)) {
      SCOPED_TRACE(::testing::Message() << impl << " " << e);
      const Pre whole(e);
      const Pre parts(e);
      run(impl, &pre_fwd, whole.forward());
      run(impl, &pre_bwd, whole.backward(true, Rounding::chain), 3);
      const Array of_pre(DType::f32, {e.s.T, e.s.n});
      test::entry_bwd_by_parts(impl, parts.parameters, parts.residual, whole.out, parts.up, {},
                               parts.targets, parts.grad_residual, of_pre, parts.gradients);
      EXPECT_EQ(whole.gradient_bits(), parts.gradient_bits());
    }
  }
}

TEST(PreBackward, SavedRecomputedInPlaceAndThreadsAreTheSameBits) {
  for (const EntryShape& e : entry_shapes()) {
    for (const std::string& impl : implementations("mhc.pre_bwd", e.s.type)) {
      for (const Rounding rounding : {Rounding::once, Rounding::chain}) {
        SCOPED_TRACE(::testing::Message() << impl << " " << e);
        const Pre saved(e);
        run(impl, &pre_fwd, saved.forward());
        run(impl, &pre_bwd, saved.backward(true, rounding));
        const Pre made(e);
        run(impl, &pre_bwd, made.backward(false, rounding), 3);
        EXPECT_EQ(made.gradient_bits(), saved.gradient_bits()) << "recomputed";
        const Pre in_place(e);
        PreBackward p = in_place.backward(false, rounding);
        p.grad_residual = p.grad_residual_acc;
        p.gradients = p.targets;
        p.grad_layer_norm_weight = p.grad_layer_norm_weight_acc;
        run(impl, &pre_bwd, p, 2);
        EXPECT_EQ(in_place.up.streams.bits(), saved.grad_residual.bits()) << "in place";
        for (size_t k = 0; k < saved.gradients.present().size(); ++k) {
          EXPECT_EQ(in_place.targets.present()[k]->bits(), saved.gradients.present()[k]->bits())
              << "in place " << k;
        }
      }
    }
  }
}

TEST(PreBackward, TargetsAreAddedTo) {
  const EntryShape e = {{33, 4, 70, DType::bf16}, true, true};
  for (const std::string& impl : implementations("mhc.pre_bwd")) {
    for (const Rounding rounding : {Rounding::once, Rounding::chain}) {
      SCOPED_TRACE(impl);
      const Pre added(e);
      run(impl, &pre_bwd, added.backward(false, rounding));
      const Pre written(e);
      PreBackward p = written.backward(false, rounding);
      p.targets = {};
      p.grad_layer_norm_weight_acc = {};
      run(impl, &pre_bwd, p);
      test::expect_added(added.gradients, added.targets, written.gradients);
      EXPECT_EQ(added.grad_residual.bits(), written.grad_residual.bits());
    }
  }
}

// Once and chain differ by roundings to A alone.
TEST(PreBackward, OnceIsTheChainWithoutItsRoundings) {
  for (const EntryShape& e : {EntryShape{{9, 4, 70, DType::f32}, true, true},
                              EntryShape{{9, 3, 70, DType::f32}, false, false}}) {
    for (const std::string& impl : implementations("mhc.pre_bwd", e.s.type)) {
      const Pre once(e);
      const Pre chain(e);
      run(impl, &pre_bwd, once.backward(false, Rounding::once));
      run(impl, &pre_bwd, chain.backward(false, Rounding::chain));
      ehc::test::expect_close(impl, once.grad_residual, chain.grad_residual, "grad_residual");
      ehc::test::expect_close(impl, once.gradients.fn, chain.gradients.fn, "grad_fn");
    }
  }
}

TEST(PreBackward, IsTheSlopeOfTheForward) {
  for (const EntryShape& e : {EntryShape{{2, 2, 5, DType::f32}, true, true},
                              EntryShape{{3, 3, 3, DType::f32}, false, false},
                              EntryShape{{2, 1, 4, DType::f32}, true, false}}) {
    Pre c(e);
    const auto loss = [&] {
      run("reference", &pre_fwd, c.forward());
      return inner_product(c.up.layer_input, c.out.layer_input) +
             inner_product(c.up.post, c.out.post) + inner_product(c.up.comb, c.out.comb);
    };
    PreBackward p = c.backward(false, Rounding::once);
    p.grad_residual_acc = {};
    p.targets = {};
    p.grad_layer_norm_weight_acc = {};
    run("reference", &pre_bwd, p);
    SCOPED_TRACE(::testing::Message() << e);
    test::expect_gradient(c.residual, c.grad_residual, loss, "residual");
    test::expect_gradient(c.parameters.fn, c.gradients.fn, loss, "fn");
    test::expect_gradient(c.parameters.scale, c.gradients.scale, loss, "scale");
    test::expect_gradient(c.parameters.base, c.gradients.base, loss, "base");
    if (e.has_norm_weight) {
      test::expect_gradient(c.parameters.norm_weight, c.gradients.norm_weight, loss, "norm_weight");
    }
  }
}

TEST(PreBackward, WithoutTokensGradientsAreTheirTargets) {
  const EntryShape e = {{0, 4, 33, DType::bf16}, true, true};
  for (const std::string& impl : implementations("mhc.pre_bwd", e.s.type)) {
    const Pre c(e);
    run(impl, &pre_fwd, c.forward());
    run(impl, &pre_bwd, c.backward(false, Rounding::once));
    EXPECT_EQ(c.gradients.bits(), c.targets.bits()) << impl;
    PreBackward p = c.backward(false, Rounding::once);
    p.targets = {};
    p.grad_layer_norm_weight_acc = {};
    run(impl, &pre_bwd, p);
    EXPECT_EQ(c.gradients.bits(), Gradients(c.parameters, 0).bits()) << impl;
  }
}

// An upstream gradient that is absent counts as zeros.
TEST(PreBackward, AbsentGradientsAreZeros) {
  const EntryShape e = {{9, 4, 33, DType::f32}, true, true};
  for (const std::string& impl : implementations("mhc.pre_bwd", e.s.type)) {
    const Pre absent(e);
    Pre zeros(e);
    PreBackward p = absent.backward(false, Rounding::once);
    p.grad_layer_input = p.grad_comb = p.grad_residual_acc = {};
    run(impl, &pre_bwd, p);
    zeros.up.layer_input.fill(0);
    zeros.up.comb.fill(0);
    zeros.up.streams.fill(0);
    run(impl, &pre_bwd, zeros.backward(false, Rounding::once));
    for (int64_t i = 0; i < absent.grad_residual.size(); ++i) {
      EXPECT_EQ(absent.grad_residual.get(i), zeros.grad_residual.get(i)) << impl << " " << i;
    }
    EXPECT_EQ(absent.gradients.fn.bits(), zeros.gradients.fn.bits()) << impl;
  }
}

TEST(Pre, RefusesWhatTheContractForbids) {
  const EntryShape e = {{3, 2, 5, DType::f32}, false, false};
  const Pre c(e);
  Context context = Context::cpu(1);
  PreForward forward = c.forward();
  forward.state.mul = {};
  EXPECT_NE(error_of([&] { pre_fwd(context, forward); }).find("mul"), std::string::npos);
  PreBackward backward = c.backward(true, Rounding::once);
  backward.state.comb = {};
  EXPECT_NE(error_of([&] { pre_bwd(context, backward); }).find("comb"), std::string::npos);
  backward = c.backward(false, Rounding::once);
  backward.targets.grad_norm_weight = c.targets.norm_weight;
  EXPECT_EQ(error_of([&] { pre_bwd(context, backward); }),
            "mhc.pre_bwd: tensor 'grad_norm_weight_acc': expected none without 'norm_weight', got "
            "F32[10]");
}

// --- head ---

struct Head {
  EntryShape e;
  Parameters parameters;
  Array residual, hidden, grad_hidden, grad_residual;
  Gradients targets, gradients;

  explicit Head(const EntryShape& shape)
      : e(shape),
        parameters(shape, shape.s.n, 1),
        residual(Array::random(e.s.type, {e.s.T, e.s.n, e.s.d}, 1)),
        hidden(e.s.type, {e.s.T, e.s.d}),
        grad_hidden(Array::random(e.s.type, {e.s.T, e.s.d}, 2)),
        grad_residual(e.s.type, {e.s.T, e.s.n, e.s.d}),
        targets(parameters, 20),
        gradients(parameters, 0) {}

  [[nodiscard]] HeadForward forward() const {
    return {.residual = residual,
            .weights = parameters.weights(),
            .hidden = hidden,
            .norm_eps = 1e-5,
            .pre_eps = 1e-2};
  }
  [[nodiscard]] HeadBackward backward(Rounding rounding) const {
    return {.grad_hidden = grad_hidden,
            .residual = residual,
            .weights = parameters.weights(),
            .targets = targets.tensors(),
            .grad_residual = grad_residual,
            .gradients = gradients.tensors(),
            .norm_eps = 1e-5,
            .pre_eps = 1e-2,
            .rounding = rounding};
  }
};

TEST(Head, ForwardAndChainHaveTheBitsOfTheirParts) {
  for (EntryShape e : entry_shapes()) {
    e.has_layer_norm = false;
    for (const std::string& impl : implementations("mhc.head_fwd", e.s.type)) {
      SCOPED_TRACE(::testing::Message() << impl << " " << e);
      const Head whole(e);
      run(impl, &head_fwd, whole.forward(), 3);
      run(impl, &head_bwd, whole.backward(Rounding::chain), 3);

      const Head parts(e);
      const int64_t n = e.s.n;
      const int64_t columns = n * e.s.d;
      const int64_t splits = prenorm_splits(e.s.T, columns);
      const Array fn = test::merged_fn(impl, parts.parameters);
      const Array mul_partial(DType::f32, {splits, e.s.T, n});
      const Array sqr_partial(DType::f32, {splits, e.s.T});
      const Array mixes(DType::f32, {e.s.T, n});
      const Array mul(DType::f32, {e.s.T, n});
      const Array sqr(DType::f32, {e.s.T});
      const Array pre(DType::f32, {e.s.T, n});
      run(impl, &prenorm_gemm,
          {.residual = parts.residual,
           .fn = fn,
           .mul_partial = mul_partial,
           .sqr_partial = sqr_partial});
      run(impl, &reduce_partials_fwd,
          {.mul_partial = mul_partial,
           .sqr_partial = sqr_partial,
           .mixes = mixes,
           .mul = mul,
           .sqr = sqr,
           .k = columns,
           .norm_eps = 1e-5});
      run(impl, &head_mix_fwd,
          {.mixes = mixes,
           .scale = parts.parameters.scale,
           .base = parts.parameters.base,
           .pre = pre,
           .pre_eps = 1e-2});
      run(impl, &pre_apply_fwd,
          {.residual = parts.residual, .pre = pre, .layer_input = parts.hidden});
      EXPECT_EQ(whole.hidden.bits(), parts.hidden.bits());

      const Array grad_pre(DType::f32, {e.s.T, n});
      const Array grad_mixes(DType::f32, {e.s.T, n});
      const Array grad_mul(DType::f32, {e.s.T, n});
      const Array grad_sqr(DType::f32, {e.s.T});
      run(impl, &pre_apply_bwd,
          {.grad_layer_input = parts.grad_hidden,
           .residual = parts.residual,
           .pre = pre,
           .grad_residual = parts.grad_residual,
           .grad_pre = grad_pre});
      run(impl, &head_mix_bwd,
          {.grad_pre = grad_pre,
           .mixes = mixes,
           .scale = parts.parameters.scale,
           .base = parts.parameters.base,
           .grad_scale_acc = parts.targets.scale,
           .grad_base_acc = parts.targets.base,
           .grad_mixes = grad_mixes,
           .grad_scale = parts.gradients.scale,
           .grad_base = parts.gradients.base});
      run(impl, &reduce_partials_bwd,
          {.grad_mixes = grad_mixes,
           .mul = mul,
           .sqr = sqr,
           .grad_mul = grad_mul,
           .grad_sqr = grad_sqr,
           .k = columns,
           .norm_eps = 1e-5});
      run(impl, &norm_fn_bwd,
          {.grad_mul = grad_mul,
           .grad_sqr = grad_sqr,
           .residual = parts.residual,
           .fn = fn,
           .grad_residual_acc = parts.grad_residual,
           .grad_residual = parts.grad_residual,
           .grad_fn = parts.gradients.fn});
      EXPECT_EQ(whole.grad_residual.bits(), parts.grad_residual.bits());
      EXPECT_EQ(whole.gradients.scale.bits(), parts.gradients.scale.bits());
      EXPECT_EQ(whole.gradients.base.bits(), parts.gradients.base.bits());
    }
  }
}

TEST(HeadBackward, TargetsAreAddedToAlsoInPlace) {
  const EntryShape e = {{33, 4, 70, DType::bf16}, true, false};
  for (const std::string& impl : implementations("mhc.head_bwd")) {
    for (const Rounding rounding : {Rounding::once, Rounding::chain}) {
      SCOPED_TRACE(impl);
      const Head added(e);
      run(impl, &head_bwd, added.backward(rounding));
      const Head written(e);
      HeadBackward p = written.backward(rounding);
      p.targets = {};
      run(impl, &head_bwd, p, 3);
      test::expect_added(added.gradients, added.targets, written.gradients);
      EXPECT_EQ(added.grad_residual.bits(), written.grad_residual.bits());
      const Head in_place(e);
      p = in_place.backward(rounding);
      p.gradients = p.targets;
      run(impl, &head_bwd, p, 2);
      for (size_t k = 0; k < added.gradients.present().size(); ++k) {
        EXPECT_EQ(in_place.targets.present()[k]->bits(), added.gradients.present()[k]->bits()) << k;
      }
    }
  }
}

TEST(HeadBackward, WithoutTokensGradientsAreTheirTargets) {
  const EntryShape e = {{0, 4, 33, DType::bf16}, true, false};
  for (const std::string& impl : implementations("mhc.head_bwd")) {
    const Head c(e);
    run(impl, &head_fwd, c.forward());
    run(impl, &head_bwd, c.backward(Rounding::once));
    for (size_t k = 0; k < c.gradients.present().size(); ++k) {
      EXPECT_EQ(c.gradients.present()[k]->bits(), c.targets.present()[k]->bits())
          << impl << " " << k;
    }
  }
}

TEST(HeadBackward, IsTheSlopeOfTheForward) {
  for (const EntryShape& e : {EntryShape{{2, 2, 5, DType::f32}, true, false},
                              EntryShape{{3, 3, 3, DType::f32}, false, false}}) {
    Head c(e);
    const auto loss = [&] {
      run("reference", &head_fwd, c.forward());
      return inner_product(c.grad_hidden, c.hidden);
    };
    HeadBackward p = c.backward(Rounding::once);
    p.targets = {};
    run("reference", &head_bwd, p);
    SCOPED_TRACE(::testing::Message() << e);
    test::expect_gradient(c.residual, c.grad_residual, loss, "residual");
    test::expect_gradient(c.parameters.fn, c.gradients.fn, loss, "fn");
    test::expect_gradient(c.parameters.scale, c.gradients.scale, loss, "scale");
    test::expect_gradient(c.parameters.base, c.gradients.base, loss, "base");
    if (e.has_norm_weight) {
      test::expect_gradient(c.parameters.norm_weight, c.gradients.norm_weight, loss, "norm_weight");
    }
  }
}

}  // namespace
}  // namespace ehc::mhc
