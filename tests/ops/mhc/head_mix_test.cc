#include "ehc/mhc/head_mix.h"

#include "ehc/mhc/split.h"
#include "tests/ops/mhc/mix_support.h"

namespace ehc::mhc {
namespace {

using test::Array;
using test::Doubles;
using test::error_of;
using test::implementations;
using test::kInf;
using test::kNan;
using test::Layout;

struct Head {
  int64_t T, n;
  Array mixes, scale, base, grad, scale_target, base_target;
  Array pre, grad_mixes, grad_scale, grad_base;

  Head(int64_t tokens, int64_t streams, Layout layout = {})
      : T(tokens),
        n(streams),
        mixes(Array::random(DType::f32, {T, n}, 1).copy(layout)),
        scale(Array::random(DType::f32, {1}, 2, 1)),
        base(Array::random(DType::f32, {n}, 3)),
        grad(Array::random(DType::f32, {T, n}, 4).copy(layout)),
        scale_target(Array::random(DType::f32, {1}, 5)),
        base_target(Array::random(DType::f32, {n}, 6)),
        pre(DType::f32, {T, n}, layout),
        grad_mixes(DType::f32, {T, n}, layout),
        grad_scale(DType::f32, {1}),
        grad_base(DType::f32, {n}) {}

  [[nodiscard]] HeadMixForward forward() const {
    return {.mixes = mixes, .scale = scale, .base = base, .pre = pre, .pre_eps = 1e-2};
  }
  [[nodiscard]] HeadMixBackward backward(bool adds = false) const {
    return {.grad_pre = grad,
            .mixes = mixes,
            .scale = scale,
            .base = base,
            .grad_scale_acc = adds ? scale_target.view() : Tensor(),
            .grad_base_acc = adds ? base_target.view() : Tensor(),
            .grad_mixes = grad_mixes,
            .grad_scale = grad_scale,
            .grad_base = grad_base};
  }
  void run(const std::string& impl, int threads = 1) const {
    test::run_on(
        impl, [](Context& c, const auto& p) { head_mix_fwd(c, p); }, forward(), threads);
    test::run_on(
        impl, [](Context& c, const auto& p) { head_mix_bwd(c, p); }, backward(), threads);
  }
  [[nodiscard]] std::string bits() const {
    return pre.bits() + grad_mixes.bits() + grad_scale.bits() + grad_base.bits();
  }
};

std::vector<std::string> kernels() { return implementations("mhc.head_mix_fwd"); }

TEST(HeadMixBackward, EqualsFiniteDifferences) {
  for (const int64_t n : {1, 3, 4, 8}) {
    const Head h(3, n);
    const auto mixes = static_cast<size_t>(3 * n);
    Doubles x = test::doubles_of(h.mixes);
    for (const Array* more : {&h.scale, &h.base}) {
      const Doubles values = test::doubles_of(*more);
      x.insert(x.end(), values.begin(), values.end());
    }
    const Doubles slopes = test::slopes_of(x, [&](const Doubles& at) {
      double loss = 0;
      for (size_t i = 0; i < mixes; ++i) {
        const double u = at[i] * at[mixes] + at[mixes + 1 + i % static_cast<size_t>(n)];
        loss += h.grad.get(static_cast<int64_t>(i)) / (1 + std::exp(-u));
      }
      return loss;
    });
    for (const std::string& impl : kernels()) {
      h.run(impl);
      Doubles got = test::doubles_of(h.grad_mixes);
      for (const Array* more : {&h.grad_scale, &h.grad_base}) {
        const Doubles values = test::doubles_of(*more);
        got.insert(got.end(), values.begin(), values.end());
      }
      test::expect_near(got, slopes, 1e-6, impl);
    }
  }
}

TEST(HeadMix, ThreadsAndLayoutsChangeNoBit) {
  for (const int64_t n : {1, 2, 3, 4, 5, 6, 7, 8}) {
    for (const std::string& impl : kernels()) {
      const Head h(1500, n);
      h.run(impl);
      for (const int threads : {2, 3, 8}) {
        const Head other(1500, n);
        other.run(impl, threads);
        EXPECT_EQ(other.bits(), h.bits()) << impl << " " << threads;
      }
      for (const Layout& layout : test::kLayouts) {
        const Head other(1500, n, layout);
        other.run(impl);
        EXPECT_EQ(other.bits(), h.bits()) << impl << " " << layout.row_padding;
      }
    }
  }
}

TEST(HeadMix, ATokenDependsOnItselfAlone) {
  for (const int64_t n : {3, 4}) {
    for (const std::string& impl : kernels()) {
      const Head whole(40, n);
      whole.run(impl);
      for (int64_t t = 0; t < 40; ++t) {
        Head one(1, n);
        for (int64_t j = 0; j < n; ++j) {
          one.mixes.set(j, whole.mixes.get(t * n + j));
          one.grad.set(j, whole.grad.get(t * n + j));
        }
        one.run(impl);
        EXPECT_EQ(one.pre.bits(), whole.pre.bits(t, t + 1)) << impl;
        EXPECT_EQ(one.grad_mixes.bits(), whole.grad_mixes.bits(t, t + 1)) << impl;
      }
    }
  }
}

// The same function as the first n mixes of a sublayer.
TEST(HeadMix, HasTheBitsOfTheSplit) {
  const Head h(9, 4);
  const Array mixes = Array::random(DType::f32, {9, 24}, 1);
  const Array scale = Array::random(DType::f32, {3}, 2, 1);
  const Array base = Array::random(DType::f32, {24}, 3);
  const Array pre(DType::f32, {9, 4});
  const Array post(DType::f32, {9, 4});
  const Array logits(DType::f32, {9, 4, 4});
  for (const std::string& impl : kernels()) {
    Context context = test::context_for(impl);
    split_fwd(context, {.mixes = mixes,
                        .scale = scale,
                        .base = base,
                        .pre = pre,
                        .post = post,
                        .comb_logits = logits,
                        .pre_eps = 1e-2,
                        .post_mult = 1});
    HeadMixForward p = h.forward();
    p.mixes = mixes.view().slice(1, 0, 4);
    p.scale = scale.rows(0, 1);
    p.base = base.rows(0, 4);
    head_mix_fwd(context, p);
    EXPECT_EQ(h.pre.bits(), pre.bits()) << impl;
  }
}

TEST(HeadMixBackward, AddsToItsTargets) {
  for (const std::string& impl : kernels()) {
    const Head h(300, 4);
    h.run(impl);
    const float scale = h.scale_target.get(0) + h.grad_scale.get(0);
    const float base = h.base_target.get(2) + h.grad_base.get(2);
    HeadMixBackward p = h.backward(true);
    p.grad_scale = p.grad_scale_acc;
    p.grad_base = p.grad_base_acc;
    test::run_on(
        impl, [](Context& c, const auto& q) { head_mix_bwd(c, q); }, p, 3);
    EXPECT_FLOAT_EQ(h.scale_target.get(0), scale) << impl;
    EXPECT_FLOAT_EQ(h.base_target.get(2), base) << impl;
  }
}

TEST(HeadMix, NoTokensGiveZeroGradients) {
  for (const std::string& impl : kernels()) {
    const Head h(0, 4);
    h.grad_base.view().as<float>()[1] = 7;
    h.run(impl, 2);
    EXPECT_EQ(h.grad_base.get(1), 0) << impl;
    EXPECT_EQ(h.grad_scale.get(0), 0) << impl;
    test::run_on(
        impl, [](Context& c, const auto& q) { head_mix_bwd(c, q); }, h.backward(true));
    EXPECT_EQ(h.grad_base.bits(), h.base_target.bits()) << impl;
  }
}

TEST(HeadMix, NanAndInfinityStayInTheirElement) {
  for (const float bad : {kNan, kInf}) {
    Head h(33, 4);
    h.mixes.set(70, bad);
    for (const std::string& impl : kernels()) {
      h.run(impl);
      for (int64_t i = 0; i < 132; ++i) {
        EXPECT_EQ(std::isnan(h.pre.get(i)), i == 70 && std::isnan(bad)) << impl;
      }
      EXPECT_TRUE(std::isnan(h.grad_scale.get(0))) << impl;
      EXPECT_EQ(std::isnan(h.grad_base.get(70 % 4)), std::isnan(bad)) << impl;
    }
  }
}

TEST(HeadMix, RefusesWhatTheContractForbids) {
  const Head h(3, 4);
  Context context = Context::cpu(1);
  HeadMixForward f = h.forward();
  const Array two(DType::f32, {2});
  const Array nine(DType::f32, {3, 9});
  f.scale = two;
  EXPECT_EQ(error_of([&] { head_mix_fwd(context, f); }),
            "mhc.head_mix_fwd: tensor 'scale': expected F32[1], got F32[2]");
  f = h.forward();
  f.mixes = nine;
  EXPECT_EQ(error_of([&] { head_mix_fwd(context, f); }),
            "mhc.head_mix_fwd: tensor 'mixes': expected n in [1,8], got F32[3,9]");
  f = h.forward();
  f.pre = f.mixes;
  EXPECT_EQ(error_of([&] { head_mix_fwd(context, f); }),
            "mhc.head_mix_fwd: tensor 'pre': expected memory apart from 'mixes', got overlapping "
            "memory");
  EXPECT_EQ(error_of([&] {
              head_mix_bwd(context, h.backward());
            }).rfind("mhc.head_mix_bwd: workspace: expected at least ", 0),
            0U);
}

}  // namespace
}  // namespace ehc::mhc
