#include "ehc/mhc/seam.h"

#include "tests/ops/mhc/sublayer.h"

namespace ehc::mhc {
namespace {

using ehc::test::error_of;
using ehc::test::expect_close;
using ehc::test::implementations;
using ehc::test::inner_product;
using test::Array;
using test::entry_shapes;
using test::EntryShape;
using test::Gradients;
using test::Parameters;
using test::run;
using test::sublayer_parameters;
using test::Upstream;

// Inputs and outputs of the classic and the single-pass seam.
struct Seam {
  EntryShape e;
  Parameters parameters;
  Array layer_output, residual, pre, post, comb, new_residual;
  test::Entry next;
  Upstream up;
  Gradients targets, gradients;
  Array grad_layer_output, grad_residual, grad_pre, grad_post, grad_comb;

  explicit Seam(const EntryShape& shape)
      : e(shape),
        parameters(sublayer_parameters(shape)),
        next(e.s),
        up(e.s, 30),
        targets(parameters, 40),
        gradients(parameters, 0) {
    const auto [T, n, d, type] = e.s;
    layer_output = Array::random(type, {T, d}, 1);
    residual = Array::random(type, {T, n, d}, 2);
    pre = Array::random(DType::f32, {T, n}, 3, 0.5F, 0.2F);
    post = Array::random(DType::f32, {T, n}, 4, 1, 0.2F);
    comb = Array::random(DType::f32, {T, n, n}, 5, 0.3F, 0.1F);
    new_residual = Array(type, {T, n, d});
    grad_layer_output = Array(type, {T, d});
    grad_residual = Array(type, {T, n, d});
    grad_pre = Array(DType::f32, {T, n});
    grad_post = Array(DType::f32, {T, n});
    grad_comb = Array(DType::f32, {T, n, n});
  }

  // What forwards and backwards of both have in common.
  template <class P>
  void set_inputs(P& p) const {
    p.layer_output = layer_output;
    p.residual = residual;
    p.post = post;
    p.comb = comb;
    if constexpr (requires { p.pre; }) p.pre = pre;
    p.weights = parameters.weights();
    p.layer_norm_weight = parameters.layer_norm();
    p.rules = test::rules_of_tests();
    if (e.has_layer_norm) p.layer_norm_eps = 1e-4;
  }
  template <class P>
  [[nodiscard]] P forward() const {
    P p;
    set_inputs(p);
    p.new_residual = new_residual;
    p.layer_input = next.layer_input;
    p.next_post = next.post;
    p.next_state = next.state();
    return p;
  }
  template <class P>
  [[nodiscard]] P backward(bool saved, Rounding rounding) const {
    P p;
    set_inputs(p);
    p.grad_new_residual = up.streams;
    p.grad_layer_input = up.layer_input;
    p.grad_next_post = up.post;
    p.grad_next_comb = up.comb;
    p.targets = targets.tensors();
    p.grad_layer_norm_weight_acc = targets.layer_norm();
    if (saved) p.new_residual = new_residual;
    if (saved) p.next_state = next.state();
    p.grad_layer_output = grad_layer_output;
    p.grad_residual = grad_residual;
    p.grad_post = grad_post;
    p.grad_comb = grad_comb;
    if constexpr (requires { p.grad_pre; }) {
      p.grad_next_pre = up.pre;
      p.grad_pre = grad_pre;
    }
    p.gradients = gradients.tensors();
    p.grad_layer_norm_weight = gradients.layer_norm();
    p.rounding = rounding;
    return p;
  }
  [[nodiscard]] std::string gradient_bits() const {
    return grad_layer_output.bits() + grad_residual.bits() + grad_pre.bits() + grad_post.bits() +
           grad_comb.bits() + gradients.bits();
  }

  // post_fwd, and the mixes of what it makes.
  void make_by_parts(const std::string& impl) {
    run(impl, &post_fwd,
        {.layer_output = layer_output,
         .residual = residual,
         .post = post,
         .comb = comb,
         .new_residual = new_residual});
    const Array fn = test::merged_fn(impl, parameters);
    test::entry_by_parts(impl, parameters, fn, new_residual, next);
  }
  void gradients_by_parts(const std::string& impl, const Tensor& earlier_pre) const {
    const Array running(e.s.type, {e.s.T, e.s.n, e.s.d});
    const Array own(DType::f32, {e.s.T, e.s.n});
    test::entry_bwd_by_parts(impl, parameters, new_residual, next, up, earlier_pre, targets,
                             running, earlier_pre ? grad_pre : own, gradients);
    run(impl, &post_bwd,
        {.grad_new_residual = running,
         .layer_output = layer_output,
         .residual = residual,
         .post = post,
         .comb = comb,
         .grad_layer_output = grad_layer_output,
         .grad_residual = grad_residual,
         .grad_post = grad_post,
         .grad_comb = grad_comb});
  }
};

TEST(SeamClassic, IsPostThenPre) {
  for (const EntryShape& e : entry_shapes()) {
    for (const std::string& impl : implementations("mhc.seam_classic_fwd", e.s.type)) {
      SCOPED_TRACE(::testing::Message() << impl << " " << e);
      const Seam whole(e);
      const Seam parts(e);
      run(impl, &seam_classic_fwd, whole.forward<SeamClassicForward>(), 3);
      run(impl, &post_fwd,
          {.layer_output = parts.layer_output,
           .residual = parts.residual,
           .post = parts.post,
           .comb = parts.comb,
           .new_residual = parts.new_residual});
      PreForward p{.residual = parts.new_residual,
                   .weights = parts.parameters.weights(),
                   .layer_norm_weight = parts.parameters.layer_norm(),
                   .layer_input = parts.next.layer_input,
                   .post = parts.next.post,
                   .state = parts.next.state(),
                   .rules = test::rules_of_tests()};
      if (e.has_layer_norm) p.layer_norm_eps = 1e-4;
      run(impl, &pre_fwd, p);
      EXPECT_EQ(whole.new_residual.bits(), parts.new_residual.bits());
      EXPECT_EQ(whole.next.bits(), parts.next.bits());
    }
  }
}

TEST(SeamSinglePass, IsPostThenTheEarlierCollapseThenTheMixes) {
  for (EntryShape e : entry_shapes()) {
    e.has_layer_norm = false;
    for (const std::string& impl : implementations("mhc.seam_single_pass_fwd", e.s.type)) {
      SCOPED_TRACE(::testing::Message() << impl << " " << e);
      const Seam whole(e);
      Seam parts(e);
      run(impl, &seam_single_pass_fwd, whole.forward<SeamSinglePassForward>(), 3);
      parts.make_by_parts(impl);
      run(impl, &pre_apply_fwd,
          {.residual = parts.new_residual,
           .pre = parts.pre,
           .layer_input = parts.next.layer_input});
      EXPECT_EQ(whole.new_residual.bits(), parts.new_residual.bits());
      EXPECT_EQ(whole.next.bits(), parts.next.bits());
    }
  }
}

// Of a seam forward, of what it always writes: not the state. `keeps_pre`: pre is among it.
template <class P>
void expect_saving_changes_no_bit(void (*op)(Context&, const P&), const char* name,
                                  bool keeps_pre) {
  for (const EntryShape& e : entry_shapes()) {
    for (const std::string& impl : implementations(name, e.s.type)) {
      SCOPED_TRACE(::testing::Message() << impl << " " << e);
      const Seam saves(e);
      run(impl, op, saves.template forward<P>(), 3);
      const Seam other(e);
      P p = other.template forward<P>();
      p.next_state = {.comb = other.next.comb};
      if (keeps_pre) p.next_state.pre = other.next.pre;
      run(impl, op, p);
      EXPECT_EQ(other.new_residual.bits(), saves.new_residual.bits());
      EXPECT_EQ(other.next.layer_input.bits(), saves.next.layer_input.bits());
      EXPECT_EQ(other.next.post.bits(), saves.next.post.bits());
      EXPECT_EQ(other.next.comb.bits(), saves.next.comb.bits());
      if (keeps_pre) {
        EXPECT_EQ(other.next.pre.bits(), saves.next.pre.bits());
      }
    }
  }
}

TEST(SeamForward, SavingChangesNoBit) {
  expect_saving_changes_no_bit(&seam_classic_fwd, "mhc.seam_classic_fwd", false);
  expect_saving_changes_no_bit(&seam_single_pass_fwd, "mhc.seam_single_pass_fwd", true);
}

TEST(SeamBackward, ChainsHaveTheBitsOfTheirParts) {
  for (EntryShape e : entry_shapes()) {
    e.has_layer_norm = false;
    for (const std::string& impl : implementations("mhc.seam_classic_bwd", e.s.type)) {
      SCOPED_TRACE(::testing::Message() << impl << " " << e);
      Seam parts(e);
      parts.make_by_parts(impl);
      const Seam classic(e);
      run(impl, &seam_classic_bwd, classic.backward<SeamClassicBackward>(false, Rounding::chain),
          3);
      parts.gradients_by_parts(impl, {});
      EXPECT_EQ(classic.gradient_bits(), parts.gradient_bits());
      const Seam single(e);
      run(impl, &seam_single_pass_bwd,
          single.backward<SeamSinglePassBackward>(false, Rounding::chain), 3);
      parts.gradients_by_parts(impl, parts.pre);
      EXPECT_EQ(single.gradient_bits(), parts.gradient_bits());
    }
  }
}

template <class Forward, class Backward>
void expect_saved_is_recomputed(void (*forward)(Context&, const Forward&),
                                void (*backward)(Context&, const Backward&), const char* name) {
  for (const EntryShape& e : entry_shapes()) {
    for (const std::string& impl : implementations(name, e.s.type)) {
      for (const Rounding rounding : {Rounding::once, Rounding::chain}) {
        SCOPED_TRACE(::testing::Message() << impl << " " << e);
        const Seam saved(e);
        run(impl, forward, saved.template forward<Forward>());
        run(impl, backward, saved.template backward<Backward>(true, rounding));
        const Seam made(e);
        run(impl, backward, made.template backward<Backward>(false, rounding), 3);
        EXPECT_EQ(made.gradient_bits(), saved.gradient_bits());
      }
    }
  }
}

TEST(SeamBackward, SavedAndRecomputedStateGiveTheSameBits) {
  expect_saved_is_recomputed(&seam_classic_fwd, &seam_classic_bwd, "mhc.seam_classic_bwd");
  expect_saved_is_recomputed(&seam_single_pass_fwd, &seam_single_pass_bwd,
                             "mhc.seam_single_pass_bwd");
}

template <class Backward>
void expect_targets_are_added_to(void (*backward)(Context&, const Backward&), const char* name) {
  const EntryShape e = {{33, 4, 70, DType::bf16}, true, true};
  for (const std::string& impl : implementations(name)) {
    for (const Rounding rounding : {Rounding::once, Rounding::chain}) {
      SCOPED_TRACE(impl);
      const Seam added(e);
      run(impl, backward, added.template backward<Backward>(false, rounding));
      const Seam written(e);
      Backward p = written.template backward<Backward>(false, rounding);
      p.targets = {};
      p.grad_layer_norm_weight_acc = {};
      run(impl, backward, p);
      test::expect_added(added.gradients, added.targets, written.gradients);
      EXPECT_EQ(added.grad_residual.bits(), written.grad_residual.bits());
      const Seam in_place(e);
      p = in_place.template backward<Backward>(false, rounding);
      p.gradients = p.targets;
      p.grad_layer_norm_weight = p.grad_layer_norm_weight_acc;
      run(impl, backward, p, 3);
      EXPECT_EQ(in_place.targets.bits(), added.gradients.bits()) << "in place";
    }
  }
}

TEST(SeamBackward, TargetsAreAddedToAlsoInPlace) {
  expect_targets_are_added_to(&seam_classic_bwd, "mhc.seam_classic_bwd");
  expect_targets_are_added_to(&seam_single_pass_bwd, "mhc.seam_single_pass_bwd");
}

template <class Backward>
void expect_once_is_close_to_chain(void (*backward)(Context&, const Backward&), const char* name) {
  const EntryShape e = {{9, 4, 70, DType::f32}, true, true};
  for (const std::string& impl : implementations(name, e.s.type)) {
    const Seam once(e);
    const Seam chain(e);
    run(impl, backward, once.template backward<Backward>(false, Rounding::once));
    run(impl, backward, chain.template backward<Backward>(false, Rounding::chain));
    expect_close(impl, once.grad_residual, chain.grad_residual, "grad_residual");
    expect_close(impl, once.grad_layer_output, chain.grad_layer_output, "grad_layer_output");
    expect_close(impl, once.gradients.fn, chain.gradients.fn, "grad_fn");
  }
}

// Once and chain differ by roundings to A alone.
TEST(SeamBackward, OnceIsTheChainWithoutItsRoundings) {
  expect_once_is_close_to_chain(&seam_classic_bwd, "mhc.seam_classic_bwd");
  expect_once_is_close_to_chain(&seam_single_pass_bwd, "mhc.seam_single_pass_bwd");
}

TEST(SeamBackward, RefusesAPartOfTheState) {
  const Seam c({{3, 2, 5, DType::f32}, false, false});
  Context context = Context::cpu(1);
  SeamClassicBackward p = c.backward<SeamClassicBackward>(true, Rounding::once);
  p.new_residual = {};
  EXPECT_NE(error_of([&] { seam_classic_bwd(context, p); }).find("new_residual"),
            std::string::npos);
  p = c.backward<SeamClassicBackward>(true, Rounding::once);
  p.next_state.sqr = {};
  EXPECT_NE(error_of([&] { seam_classic_bwd(context, p); }).find("sqr"), std::string::npos);
}

template <class Forward, class Backward>
void expect_slopes_of(void (*forward)(Context&, const Forward&),
                      void (*backward)(Context&, const Backward&)) {
  for (const EntryShape& e : {EntryShape{{2, 2, 5, DType::f32}, true, true},
                              EntryShape{{2, 3, 3, DType::f32}, false, false}}) {
    SCOPED_TRACE(::testing::Message() << e);
    Seam c(e);
    const auto loss = [&] {
      run("reference", forward, c.template forward<Forward>());
      double sum = inner_product(c.up.streams, c.new_residual) +
                   inner_product(c.up.layer_input, c.next.layer_input) +
                   inner_product(c.up.post, c.next.post) + inner_product(c.up.comb, c.next.comb);
      if constexpr (requires(Backward p) { p.grad_pre; }) {
        sum += inner_product(c.up.pre, c.next.pre);
      }
      return sum;
    };
    Backward p = c.template backward<Backward>(false, Rounding::once);
    p.targets = {};
    p.grad_layer_norm_weight_acc = {};
    run("reference", backward, p);
    test::expect_gradient(c.layer_output, c.grad_layer_output, loss, "layer_output");
    test::expect_gradient(c.residual, c.grad_residual, loss, "residual");
    test::expect_gradient(c.post, c.grad_post, loss, "post");
    test::expect_gradient(c.comb, c.grad_comb, loss, "comb");
    if constexpr (requires { p.grad_pre; }) {
      test::expect_gradient(c.pre, c.grad_pre, loss, "pre");
    }
    test::expect_gradient(c.parameters.fn, c.gradients.fn, loss, "fn");
    test::expect_gradient(c.parameters.scale, c.gradients.scale, loss, "scale");
    test::expect_gradient(c.parameters.base, c.gradients.base, loss, "base");
    if (e.has_norm_weight) {
      test::expect_gradient(c.parameters.norm_weight, c.gradients.norm_weight, loss, "norm_weight");
    }
  }
}

TEST(SeamBackward, IsTheSlopeOfTheForward) {
  expect_slopes_of(&seam_classic_fwd, &seam_classic_bwd);
  expect_slopes_of(&seam_single_pass_fwd, &seam_single_pass_bwd);
}

TEST(SeamBackward, WithoutTokensGradientsAreTheirTargets) {
  const EntryShape e = {{0, 4, 33, DType::bf16}, true, true};
  for (const std::string& impl : implementations("mhc.seam_classic_bwd", e.s.type)) {
    const Seam c(e);
    run(impl, &seam_classic_fwd, c.forward<SeamClassicForward>());
    run(impl, &seam_classic_bwd, c.backward<SeamClassicBackward>(false, Rounding::once));
    EXPECT_EQ(c.gradients.bits(), c.targets.bits()) << impl;
    const Seam single(e);
    run(impl, &seam_single_pass_fwd, single.forward<SeamSinglePassForward>());
    run(impl, &seam_single_pass_bwd,
        single.backward<SeamSinglePassBackward>(false, Rounding::once));
    EXPECT_EQ(single.gradients.bits(), single.targets.bits()) << impl;
  }
}

// --- broadcast ---

struct Broadcast {
  EntryShape e;
  Parameters parameters;
  Array hidden, residual;
  test::Entry out;
  Upstream up;
  Gradients targets, gradients;
  Array grad_hidden;

  explicit Broadcast(const EntryShape& shape)
      : e(shape),
        parameters(sublayer_parameters(shape)),
        hidden(Array::random(e.s.type, {e.s.T, e.s.d}, 1)),
        residual(e.s.type, {e.s.T, e.s.n, e.s.d}),
        out(e.s),
        up(e.s, 30),
        targets(parameters, 40),
        gradients(parameters, 0),
        grad_hidden(e.s.type, {e.s.T, e.s.d}) {}

  [[nodiscard]] SeamBroadcastForward forward(SeamForm form) const {
    SeamBroadcastForward p{.hidden = hidden,
                           .weights = parameters.weights(),
                           .layer_norm_weight = parameters.layer_norm(),
                           .residual = residual,
                           .layer_input = out.layer_input,
                           .post = out.post,
                           .state = out.state(),
                           .rules = test::rules_of_tests(),
                           .form = form};
    if (e.has_layer_norm) p.layer_norm_eps = 1e-4;
    return p;
  }
  [[nodiscard]] SeamBroadcastBackward backward(SeamForm form, bool saved) const {
    SeamBroadcastBackward p{.grad_residual = up.streams,
                            .grad_layer_input = up.layer_input,
                            .grad_pre = up.pre,
                            .grad_post = up.post,
                            .grad_comb = up.comb,
                            .hidden = hidden,
                            .weights = parameters.weights(),
                            .layer_norm_weight = parameters.layer_norm(),
                            .targets = targets.tensors(),
                            .grad_layer_norm_weight_acc = targets.layer_norm(),
                            .state = saved ? out.state() : MixState{},
                            .grad_hidden = grad_hidden,
                            .gradients = gradients.tensors(),
                            .grad_layer_norm_weight = gradients.layer_norm(),
                            .rules = test::rules_of_tests(),
                            .form = form};
    if (e.has_layer_norm) p.layer_norm_eps = 1e-4;
    return p;
  }
};

// The projection of a row with fn summed over the streams, and the collapse of n copies.
TEST(SeamBroadcast, IsExpandThenPreOfOneRow) {
  for (EntryShape e : entry_shapes()) {
    e.has_layer_norm = false;
    for (const std::string& impl : implementations("mhc.seam_broadcast_fwd", e.s.type)) {
      SCOPED_TRACE(::testing::Message() << impl << " " << e);
      const Broadcast classic(e);
      const Broadcast single(e);
      run(impl, &seam_broadcast_fwd, classic.forward(SeamForm::classic), 3);
      run(impl, &seam_broadcast_fwd, single.forward(SeamForm::single_pass), 3);
      EXPECT_EQ(single.out.layer_input.bits(), single.hidden.bits());

      const Broadcast parts(e);
      // Moves bits: there is no second reference.
      const std::string copies = impl == "reference.f32" ? "reference" : impl;
      run(copies, &expand_fwd, {.hidden = parts.hidden, .residual = parts.residual, .n = e.s.n});
      EXPECT_EQ(classic.residual.bits(), parts.residual.bits());
      EXPECT_EQ(single.residual.bits(), parts.residual.bits());
      run(impl, &pre_apply_fwd,
          {.residual = parts.residual,
           .pre = classic.out.pre,
           .layer_input = parts.out.layer_input});
      EXPECT_EQ(classic.out.layer_input.bits(), parts.out.layer_input.bits());

      const Array fn = test::merged_fn(impl, parts.parameters);
      const int64_t mixes = fn.view().shape[0];
      Array sum(DType::f32, {mixes, e.s.d});
      for (int64_t k = 0; k < mixes * e.s.d; ++k) {
        float total = 0;
        for (int64_t i = 0; i < e.s.n; ++i) {
          const float part = fn.get((k / e.s.d * e.s.n + i) * e.s.d + k % e.s.d);
          total = i == 0 ? part : total + part;
        }
        sum.set(k, total);
      }
      const int64_t splits = prenorm_splits(e.s.T, e.s.d);
      const Array mul(DType::f32, {splits, e.s.T, mixes});
      const Array sqr(DType::f32, {splits, e.s.T});
      Tensor row = parts.hidden;
      row.rank = 3;
      row.shape[2] = row.shape[1];
      row.shape[1] = 1;
      row.stride[1] = row.shape[2];
      row.stride[2] = 1;
      run(impl, &prenorm_gemm,
          {.residual = row, .fn = sum, .mul_partial = mul, .sqr_partial = sqr});
      run(impl, &reduce_partials_fwd,
          {.mul_partial = mul,
           .sqr_partial = sqr,
           .mixes = parts.out.mixes,
           .mul = parts.out.mul,
           .sqr = parts.out.sqr,
           .k = e.s.d,
           .norm_eps = test::rules_of_tests().norm_eps});
      EXPECT_EQ(classic.out.mixes.bits(), parts.out.mixes.bits());
    }
  }
}

TEST(SeamBroadcastBackward, SavedAndRecomputedStateGiveTheSameBits) {
  for (const EntryShape& e : entry_shapes()) {
    for (const std::string& impl : implementations("mhc.seam_broadcast_bwd", e.s.type)) {
      for (const SeamForm form : {SeamForm::classic, SeamForm::single_pass}) {
        SCOPED_TRACE(::testing::Message() << impl << " " << e);
        const Broadcast saved(e);
        run(impl, &seam_broadcast_fwd, saved.forward(form));
        run(impl, &seam_broadcast_bwd, saved.backward(form, true));
        const Broadcast made(e);
        run(impl, &seam_broadcast_bwd, made.backward(form, false), 3);
        EXPECT_EQ(made.grad_hidden.bits(), saved.grad_hidden.bits());
        EXPECT_EQ(made.gradients.bits(), saved.gradients.bits());
      }
    }
  }
}

TEST(SeamBroadcast, SavingChangesNoBit) {
  for (const EntryShape& e : entry_shapes()) {
    for (const std::string& impl : implementations("mhc.seam_broadcast_fwd", e.s.type)) {
      for (const SeamForm form : {SeamForm::classic, SeamForm::single_pass}) {
        SCOPED_TRACE(::testing::Message() << impl << " " << e);
        const Broadcast saves(e);
        run(impl, &seam_broadcast_fwd, saves.forward(form));
        const Broadcast other(e);
        SeamBroadcastForward p = other.forward(form);
        p.state = {.pre = other.out.pre, .comb = other.out.comb};
        run(impl, &seam_broadcast_fwd, p, 3);
        EXPECT_EQ(other.residual.bits(), saves.residual.bits());
        EXPECT_EQ(other.out.layer_input.bits(), saves.out.layer_input.bits());
        EXPECT_EQ(other.out.pre.bits() + other.out.post.bits() + other.out.comb.bits(),
                  saves.out.pre.bits() + saves.out.post.bits() + saves.out.comb.bits());
      }
    }
  }
}

TEST(SeamBroadcastBackward, TargetsAreAddedToAlsoInPlace) {
  const EntryShape e = {{33, 4, 70, DType::bf16}, true, true};
  for (const std::string& impl : implementations("mhc.seam_broadcast_bwd")) {
    for (const SeamForm form : {SeamForm::classic, SeamForm::single_pass}) {
      SCOPED_TRACE(impl);
      const Broadcast added(e);
      run(impl, &seam_broadcast_bwd, added.backward(form, false));
      const Broadcast written(e);
      SeamBroadcastBackward p = written.backward(form, false);
      p.targets = {};
      p.grad_layer_norm_weight_acc = {};
      run(impl, &seam_broadcast_bwd, p);
      test::expect_added(added.gradients, added.targets, written.gradients);
      EXPECT_EQ(added.grad_hidden.bits(), written.grad_hidden.bits());
      const Broadcast in_place(e);
      p = in_place.backward(form, false);
      p.gradients = p.targets;
      p.grad_layer_norm_weight = p.grad_layer_norm_weight_acc;
      run(impl, &seam_broadcast_bwd, p, 3);
      EXPECT_EQ(in_place.targets.bits(), added.gradients.bits()) << "in place";
    }
  }
}

TEST(SeamBroadcastBackward, IsTheSlopeOfTheForward) {
  for (const EntryShape& e : {EntryShape{{2, 2, 5, DType::f32}, true, true},
                              EntryShape{{2, 3, 3, DType::f32}, false, false}}) {
    for (const SeamForm form : {SeamForm::classic, SeamForm::single_pass}) {
      SCOPED_TRACE(::testing::Message() << e);
      Broadcast c(e);
      const auto loss = [&] {
        run("reference", &seam_broadcast_fwd, c.forward(form));
        return inner_product(c.up.streams, c.residual) +
               inner_product(c.up.layer_input, c.out.layer_input) +
               inner_product(c.up.pre, c.out.pre) + inner_product(c.up.post, c.out.post) +
               inner_product(c.up.comb, c.out.comb);
      };
      SeamBroadcastBackward p = c.backward(form, false);
      p.targets = {};
      p.grad_layer_norm_weight_acc = {};
      run("reference", &seam_broadcast_bwd, p);
      test::expect_gradient(c.hidden, c.grad_hidden, loss, "hidden");
      test::expect_gradient(c.parameters.fn, c.gradients.fn, loss, "fn");
      test::expect_gradient(c.parameters.scale, c.gradients.scale, loss, "scale");
      test::expect_gradient(c.parameters.base, c.gradients.base, loss, "base");
      if (e.has_norm_weight) {
        test::expect_gradient(c.parameters.norm_weight, c.gradients.norm_weight, loss,
                              "norm_weight");
      }
    }
  }
}

TEST(SeamBroadcast, RefusesAnFnOfAnotherWidth) {
  const Broadcast c({{3, 2, 5, DType::f32}, false, false});
  const Array hidden(DType::f32, {3, 4});
  const Array layer_input(DType::f32, {3, 4});
  SeamBroadcastForward p = c.forward(SeamForm::classic);
  p.hidden = hidden;
  p.layer_input = layer_input;
  Context context = Context::cpu(1);
  EXPECT_EQ(error_of([&] { seam_broadcast_fwd(context, p); }),
            "mhc.seam_broadcast_fwd: tensor 'fn': expected F32[N,n*d] with N = n*n + 2*n, got "
            "F32[8,10]");
}

}  // namespace
}  // namespace ehc::mhc
