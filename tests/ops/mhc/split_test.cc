#include "ehc/mhc/split.h"

#include "ops/mhc/split/split_math.h"
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

struct Split {
  int64_t T, n, N;
  Array mixes, scale, base, grad_pre, grad_post, grad_logits;
  Array pre, post, logits, grad_mixes, scale_partial, base_partial;

  Split(int64_t tokens, int64_t streams, Layout layout = {})
      : T(tokens),
        n(streams),
        N(n * n + 2 * n),
        mixes(Array::random(DType::f32, {T, N}, 1).copy(layout)),
        scale(Array::random(DType::f32, {3}, 2, 1)),
        base(Array::random(DType::f32, {N}, 3)),
        grad_pre(Array::random(DType::f32, {T, n}, 4).copy(layout)),
        grad_post(Array::random(DType::f32, {T, n}, 5).copy(layout)),
        grad_logits(Array::random(DType::f32, {T, n, n}, 6).copy(layout)),
        pre(DType::f32, {T, n}, layout),
        post(DType::f32, {T, n}, layout),
        logits(DType::f32, {T, n, n}, layout),
        grad_mixes(DType::f32, {T, N}, layout),
        scale_partial(DType::f32, {split_partials(T), 3}, layout),
        base_partial(DType::f32, {split_partials(T), N}, layout) {}

  [[nodiscard]] SplitForward forward() const {
    return {.mixes = mixes,
            .scale = scale,
            .base = base,
            .pre = pre,
            .post = post,
            .comb_logits = logits,
            .pre_eps = 1e-2,
            .post_mult = 2};
  }
  [[nodiscard]] SplitBackward backward() const {
    return {.grad_pre = grad_pre,
            .grad_post = grad_post,
            .grad_comb_logits = grad_logits,
            .mixes = mixes,
            .scale = scale,
            .base = base,
            .grad_mixes = grad_mixes,
            .grad_scale_partial = scale_partial,
            .grad_base_partial = base_partial,
            .post_mult = 2};
  }
  void run(const std::string& impl, int threads = 1) const {
    test::run_on(
        impl, [](Context& c, const auto& p) { split_fwd(c, p); }, forward(), threads);
    test::run_on(
        impl, [](Context& c, const auto& p) { split_bwd(c, p); }, backward(), threads);
  }
  [[nodiscard]] std::string bits() const {
    return pre.bits() + post.bits() + logits.bits() + grad_mixes.bits() + scale_partial.bits() +
           base_partial.bits();
  }
};

std::vector<std::string> kernels() { return implementations("mhc.split_fwd"); }

// The sums of [P, width] over P.
Doubles column_sums(const Array& partial) {
  const int64_t width = partial.view().shape[1];
  Doubles sums(static_cast<size_t>(width));
  for (int64_t i = 0; i < partial.size(); ++i)
    sums[static_cast<size_t>(i % width)] += partial.get(i);
  return sums;
}

// The loss of all outputs in double, of mixes, then scale, then base.
double loss_of(const Split& s, const Doubles& x) {
  const auto mixes = static_cast<size_t>(s.T * s.N);
  double loss = 0;
  for (size_t at = 0; at < mixes; ++at) {
    const auto j = static_cast<int64_t>(at) % s.N;
    const int64_t t = static_cast<int64_t>(at) / s.N;
    const int64_t segment = j < s.n ? 0 : j < 2 * s.n ? 1 : 2;
    const double u =
        x[at] * x[mixes + static_cast<size_t>(segment)] + x[mixes + 3 + static_cast<size_t>(j)];
    const double gate = 1 / (1 + std::exp(-u));
    if (segment == 0) loss += s.grad_pre.get(t * s.n + j) * (gate + 1e-2);
    if (segment == 1) loss += s.grad_post.get(t * s.n + j - s.n) * 2 * gate;
    if (segment == 2) loss += s.grad_logits.get(t * s.n * s.n + j - 2 * s.n) * u;
  }
  return loss;
}

TEST(SplitBackward, EqualsFiniteDifferences) {
  for (const int64_t n : {1, 2, 4, 5}) {
    const Split s(3, n);
    Doubles x = test::doubles_of(s.mixes);
    for (const Array* more : {&s.scale, &s.base}) {
      const Doubles values = test::doubles_of(*more);
      x.insert(x.end(), values.begin(), values.end());
    }
    const Doubles slopes = test::slopes_of(x, [&](const Doubles& at) { return loss_of(s, at); });
    for (const std::string& impl : kernels()) {
      s.run(impl);
      Doubles got = test::doubles_of(s.grad_mixes);
      for (const Array* partial : {&s.scale_partial, &s.base_partial}) {
        const Doubles sums = column_sums(*partial);
        got.insert(got.end(), sums.begin(), sums.end());
      }
      test::expect_near(got, slopes, 1e-6, impl);
    }
  }
}

TEST(Split, ThreadsAndLayoutsChangeNoBit) {
  for (const int64_t n : {1, 2, 3, 4, 5, 6, 7, 8}) {
    for (const std::string& impl : kernels()) {
      const Split s(70, n);
      s.run(impl);
      for (int threads = 2; threads <= 8; ++threads) {
        const Split other(70, n);
        other.run(impl, threads);
        EXPECT_EQ(other.bits(), s.bits()) << impl << " " << threads;
      }
      for (const Layout& layout : test::kLayouts) {
        const Split other(70, n, layout);
        other.run(impl);
        EXPECT_EQ(other.bits(), s.bits()) << impl << " " << layout.row_padding;
      }
    }
  }
}

TEST(Split, ATokenDependsOnItselfAlone) {
  for (const int64_t n : {3, 4, 8}) {
    for (const std::string& impl : kernels()) {
      const Split whole(9, n);
      whole.run(impl);
      for (int64_t t = 0; t < 9; ++t) {
        const Split one(1, n);
        SplitForward f = one.forward();
        f.mixes = whole.mixes.rows(t, t + 1);
        SplitBackward b = one.backward();
        b.mixes = f.mixes;
        b.grad_pre = whole.grad_pre.rows(t, t + 1);
        b.grad_post = whole.grad_post.rows(t, t + 1);
        b.grad_comb_logits = whole.grad_logits.rows(t, t + 1);
        Context context = test::context_for(impl);
        split_fwd(context, f);
        split_bwd(context, b);
        EXPECT_EQ(one.pre.bits(), whole.pre.bits(t, t + 1)) << impl;
        EXPECT_EQ(one.post.bits(), whole.post.bits(t, t + 1)) << impl;
        EXPECT_EQ(one.logits.bits(), whole.logits.bits(t, t + 1)) << impl;
        EXPECT_EQ(one.grad_mixes.bits(), whole.grad_mixes.bits(t, t + 1)) << impl;
      }
    }
  }
}

// Logits have no transcendental function: all but the reference in double agree.
TEST(Split, LogitsAreExact) {
  const Split s(9, 5);
  for (const std::string& impl : test::exact_implementations("mhc.split_fwd")) {
    s.run(impl);
    for (int64_t i = 0; i < s.logits.size(); ++i) {
      const int64_t j = 10 + i % 25;
      EXPECT_EQ(s.logits.get(i),
                std::fma(s.mixes.get(i / 25 * 35 + j), s.scale.get(2), s.base.get(j)))
          << impl;
    }
  }
}

// post_mult 0 leaves nothing of post, and its gradient is 0 instead of 0/0.
TEST(SplitBackward, StandsAMultiplierOfZero) {
  const Split s(3, 4);
  for (const std::string& impl : kernels()) {
    SplitForward f = s.forward();
    SplitBackward b = s.backward();
    f.post_mult = b.post_mult = 0;
    Context context = test::context_for(impl);
    split_fwd(context, f);
    split_bwd(context, b);
    for (int64_t i = 0; i < 12; ++i) EXPECT_EQ(s.post.get(i), 0) << impl;
    for (int64_t i = 0; i < 72; ++i) {
      EXPECT_EQ(s.grad_mixes.get(i) == 0, i % 24 >= 4 && i % 24 < 8) << impl << " " << i;
    }
  }
}

// s (1 - s) of a large logit keeps its relative precision.
TEST(SplitBackward, SlopesDoNotCancel) {
  Split s(1, 1);
  s.scale.fill(1);
  s.base.fill(0);
  s.grad_pre.fill(1);
  for (const float u : {20.0F, 40.0F, 80.0F, -20.0F, -80.0F}) {
    s.mixes.fill(u);
    const double e = std::exp(-std::fabs(static_cast<double>(u)));
    for (const std::string& impl : kernels()) {
      s.run(impl);
      EXPECT_NEAR(s.grad_mixes.get(0) / (e / ((1 + e) * (1 + e))), 1, 1e-6) << impl << " " << u;
    }
  }
}

TEST(Split, NanAndInfinityStayInTheirToken) {
  for (const float bad : {kNan, kInf, -kInf}) {
    for (const std::string& impl : kernels()) {
      Split s(3, 4);
      for (int64_t j = 0; j < 24; ++j) s.mixes.set(24 + j, bad);
      s.run(impl);
      for (int64_t i = 0; i < 12; ++i) {
        EXPECT_EQ(std::isnan(s.pre.get(i)), std::isnan(bad) && i / 4 == 1) << impl;
        EXPECT_EQ(std::isnan(s.post.get(i)), std::isnan(bad) && i / 4 == 1) << impl;
        if (i / 4 == 1 && std::isinf(bad)) {
          EXPECT_EQ(s.pre.get(i), (bad > 0) == (s.scale.get(0) > 0) ? 1.01F : 0.01F) << impl;
        }
      }
      for (int64_t i = 0; i < 48; ++i) {
        EXPECT_EQ(std::isfinite(s.logits.get(i)), i / 16 != 1) << impl;
      }
    }
  }
}

// --- sums of the partials ------------------------------------------------------------------------

struct Sums {
  Array scale_partial, base_partial, scale_target, base_target, scale, base;

  Sums(int64_t P, int64_t Q, int64_t N, Layout layout = {})
      : scale_partial(Array::random(DType::f32, {P, Q}, 1).copy(layout)),
        base_partial(Array::random(DType::f32, {P, N}, 2).copy(layout)),
        scale_target(Array::random(DType::f32, {Q}, 3)),
        base_target(Array::random(DType::f32, {N}, 4)),
        scale(DType::f32, {Q}),
        base(DType::f32, {N}) {}

  [[nodiscard]] SplitBackwardReduce params(bool adds) const {
    return {.grad_scale_partial = scale_partial,
            .grad_base_partial = base_partial,
            .grad_scale_acc = adds ? scale_target.view() : Tensor(),
            .grad_base_acc = adds ? base_target.view() : Tensor(),
            .grad_scale = scale,
            .grad_base = base};
  }
};

TEST(SplitBackwardReduce, AddsInAscendingOrder) {
  for (const std::string& impl : test::exact_implementations("mhc.split_bwd_reduce")) {
    for (const int64_t partials : {0, 1, 5, 128}) {
      for (const auto& [Q, N] : {std::pair<int, int>{3, 24}, {1, 4}, {3, 80}, {1, 33}}) {
        for (const bool adds : {false, true}) {
          const Sums s(partials, Q, N, {.row_padding = 3, .offset = 1});
          Context context = test::context_for(impl);
          split_bwd_reduce(context, s.params(adds));
          for (int64_t j = 0; j < N; ++j) {
            float sum = 0;
            for (int64_t p = 0; p < partials; ++p) sum += s.base_partial.get(p * N + j);
            EXPECT_EQ(s.base.get(j), (adds ? s.base_target.get(j) : 0) + sum) << impl;
          }
          const std::string want = s.scale.bits() + s.base.bits();
          SplitBackwardReduce p = s.params(adds);
          if (!adds) continue;
          p.grad_scale = p.grad_scale_acc;
          p.grad_base = p.grad_base_acc;
          split_bwd_reduce(context, p);
          EXPECT_EQ(s.scale_target.bits() + s.base_target.bits(), want) << "in place, " << impl;
        }
      }
    }
  }
}

TEST(SplitBackwardReduce, CompletesTheGradient) {
  const Split s(300, 4);
  const Sums sums(split_partials(300), 3, 24);
  for (const std::string& impl : kernels()) {
    s.run(impl);
    SplitBackwardReduce p = sums.params(false);
    p.grad_scale_partial = s.scale_partial;
    p.grad_base_partial = s.base_partial;
    Context context = test::context_for(impl);
    split_bwd_reduce(context, p);
    test::expect_near(test::doubles_of(sums.scale), column_sums(s.scale_partial), 1e-6, impl);
    test::expect_near(test::doubles_of(sums.base), column_sums(s.base_partial), 1e-6, impl);
  }
}

// --- edges ---------------------------------------------------------------------------------------

TEST(Split, NoTokensGiveNoPartials) {
  EXPECT_EQ(split_partials(0), 0);
  for (const std::string& impl : kernels()) Split(0, 4).run(impl, 2);
}

TEST(Split, RefusesWhatTheContractForbids) {
  const Split s(3, 4);
  const auto refused = [&](const std::function<void(SplitForward&)>& change) {
    SplitForward p = s.forward();
    change(p);
    Context context = Context::cpu(1);
    return error_of([&] { split_fwd(context, p); });
  };
  EXPECT_EQ(refused([](SplitForward&) {}), "none");
  for (const int64_t columns : {1, 23, 25, 79}) {
    const Array mixes(DType::f32, {3, columns});
    const Array base(DType::f32, {columns});
    EXPECT_EQ(refused([&](SplitForward& p) { p.mixes = mixes, p.base = base; }),
              "mhc.split_fwd: tensor 'mixes': expected N = n*n + 2*n columns, got F32[3," +
                  std::to_string(columns) + "]");
  }
  const Array wide(DType::f32, {3, 99});
  EXPECT_EQ(refused([&](SplitForward& p) { p.mixes = wide; }),
            "mhc.split_fwd: tensor 'mixes': expected N in [1,80], got F32[3,99]");
  const Array two(DType::f32, {2});
  EXPECT_EQ(refused([&](SplitForward& p) { p.scale = two; }),
            "mhc.split_fwd: tensor 'scale': expected F32[3], got F32[2]");
  EXPECT_EQ(refused([](SplitForward& p) { p.post_mult = -1; }),
            "mhc.split_fwd: attribute 'post_mult': expected a finite number >= 0, got -1");
  EXPECT_EQ(refused([](SplitForward& p) { p.pre_eps = {}; }),
            "mhc.split_fwd: attribute 'pre_eps': expected a value, got none");
  EXPECT_EQ(refused([](SplitForward& p) { p.post = p.pre; }),
            "mhc.split_fwd: tensor 'pre': expected memory apart from 'post', got overlapping "
            "memory");

  SplitBackward b = s.backward();
  const Array other(DType::f32, {3, 15});
  b.mixes = other;
  Context context = Context::cpu(1);
  EXPECT_EQ(error_of([&] { split_bwd(context, b); }),
            "mhc.split_bwd: tensor 'mixes': expected F32[3,24], got F32[3,15]");

  const Sums sums(3, 2, 24);
  EXPECT_EQ(error_of([&] { split_bwd_reduce(context, sums.params(false)); }),
            "mhc.split_bwd_reduce: tensor 'grad_scale_partial': expected Q = 3 columns, or 1, got "
            "F32[3,2]");
}

}  // namespace
}  // namespace ehc::mhc
