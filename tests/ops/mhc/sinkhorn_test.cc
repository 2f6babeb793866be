#include "ehc/mhc/sinkhorn.h"

#include "ops/mhc/sinkhorn/sinkhorn_math.h"
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

constexpr SinkhornConvention kConventions[] = {
    SinkhornConvention::deepseek, SinkhornConvention::megatron, SinkhornConvention::log};

struct Maps {
  int64_t T, n;
  int64_t repeat = 20;
  double eps = 1e-6;
  SinkhornConvention convention = SinkhornConvention::deepseek;
  Array logits, grad, comb, grad_logits;

  Maps(int64_t tokens, int64_t streams, float spread = 1, Layout layout = {})
      : T(tokens),
        n(streams),
        logits(Array::random(DType::f32, {T, n, n}, 1, 0, spread).copy(layout)),
        grad(Array::random(DType::f32, {T, n, n}, 2).copy(layout)),
        comb(DType::f32, {T, n, n}, layout),
        grad_logits(DType::f32, {T, n, n}, layout) {}

  [[nodiscard]] SinkhornForward forward() const {
    return {.comb_logits = logits,
            .comb = comb,
            .repeat = repeat,
            .eps = eps,
            .convention = convention};
  }
  [[nodiscard]] SinkhornBackward backward() const {
    return {.grad_comb = grad,
            .comb_logits = logits,
            .grad_comb_logits = grad_logits,
            .repeat = repeat,
            .eps = eps,
            .convention = convention};
  }
  void run(const std::string& impl, int threads = 1) const {
    test::run_on(
        impl, [](Context& c, const auto& p) { sinkhorn_fwd(c, p); }, forward(), threads);
    test::run_on(
        impl, [](Context& c, const auto& p) { sinkhorn_bwd(c, p); }, backward(), threads);
  }
  [[nodiscard]] std::string bits() const { return comb.bits() + grad_logits.bits(); }
  // The sum of a row, or of a column.
  [[nodiscard]] double line(int64_t t, int64_t at, bool row) const {
    double sum = 0;
    for (int64_t k = 0; k < n; ++k) sum += comb.get((t * n + (row ? at : k)) * n + (row ? k : at));
    return sum;
  }
};

// --- the mathematics in double -------------------------------------------------------------------

SinkhornRule rule_of(const Maps& m) {
  return {m.n, m.repeat, static_cast<float>(m.eps), static_cast<SinkhornForm>(m.convention)};
}

struct DoubleDivision {
  auto operator()(double divisor) const {
    return [divisor](double x) { return x / divisor; };
  }
};

// One map by the half-steps of the contract, in the order in which they are written there.
Doubles map_of(const SinkhornRule& rule, const Doubles& logits) {
  const int64_t n = rule.streams;
  Doubles y(logits.size());
  const auto divide_lines = [&](bool rows) {
    for (int64_t line = 0; line < n; ++line) {
      double sum = 0;
      const auto at = [&](int64_t k) -> double& {
        return y[static_cast<size_t>(rows ? line * n + k : k * n + line)];
      };
      for (int64_t k = 0; k < n; ++k) sum += at(k);
      const double eps = rule.eps;
      double divisor = sum;
      if (rule.form == SinkhornForm::deepseek) divisor += eps;
      if (rule.form == SinkhornForm::megatron) divisor = std::max(sum, eps);
      for (int64_t k = 0; k < n; ++k) at(k) /= divisor;
    }
  };
  for (int64_t i = 0; i < n; ++i) {
    const auto row = logits.begin() + i * n;
    const double largest = *std::max_element(row, row + n);
    double sum = 0;
    for (int64_t o = 0; o < n; ++o) sum += std::exp(row[o] - largest);
    for (int64_t o = 0; o < n; ++o) {
      const double e = std::exp(row[o] - largest);
      y[static_cast<size_t>(i * n + o)] =
          rule.form == SinkhornForm::deepseek ? e / sum + rule.eps : e;
    }
  }
  for (int64_t round = 0; round < rule.repeat; ++round) {
    if (round > 0 || rule.form != SinkhornForm::deepseek) divide_lines(true);
    divide_lines(false);
  }
  return y;
}

// The gradient by sinkhorn_math.h in double.
Doubles gradient_of(const SinkhornRule& rule, const Doubles& logits, Doubles grad) {
  const SinkhornConstants<double> constants = {0, 1, rule.eps};
  Doubles y(kMaxMatrix);
  if (rule.form == SinkhornForm::log) {
    Doubles potentials((2 * kMaxRepeat + 1) * kMaxStreams);
    sinkhorn_log_iterate_all<0>(rule, constants, logits.data(), potentials.data());
    sinkhorn_log_back<0>(rule, logits.data(), potentials.data(), y.data(), grad.data());
    return grad;
  }
  Doubles divisors(2 * kMaxRepeat * kMaxStreams);
  Doubles start(kMaxMatrix);
  sinkhorn_start<0>(rule, logits.data(), start.data());
  y = start;
  sinkhorn_iterate<0>(
      rule, constants, DoubleDivision{},
      [&](double* iterate, double* of_round) {
        for (int64_t round = 0; round < whole_rounds(rule); ++round, of_round += 2 * rule.streams) {
          sinkhorn_round<0>(rule, constants, DoubleDivision{}, iterate, of_round);
        }
      },
      y.data(), divisors.data());
  sinkhorn_iterate_back<0>(rule, constants, divisors.data(), start.data(), y.data(), grad.data());
  return grad;
}

TEST(SinkhornBackward, EqualsFiniteDifferences) {
  for (const SinkhornConvention convention : kConventions) {
    for (const auto& [n, repeat] :
         {std::pair<int, int>{1, 3}, {2, 5}, {3, 20}, {4, 1}, {4, 20}, {5, 2}, {8, 10}}) {
      // With this eps some sums of `megatron` are clamped and others are not, none nearly.
      for (const double eps : {1e-6, 0.4}) {
        Maps m(1, n);
        m.repeat = repeat;
        m.eps = eps;
        m.convention = convention;
        SCOPED_TRACE(::testing::Message() << "n=" << n << " repeat=" << repeat << " eps=" << eps
                                          << " convention " << static_cast<int>(convention));
        const SinkhornRule rule = rule_of(m);
        const Doubles logits = test::doubles_of(m.logits);
        const Doubles weight = test::doubles_of(m.grad);
        const Doubles slopes = test::slopes_of(
            logits, [&](const Doubles& x) { return test::inner_product(weight, map_of(rule, x)); });
        const Doubles gradient = gradient_of(rule, logits, weight);
        test::expect_near(gradient, slopes, 1e-7, "in double");
        for (const std::string& impl : implementations("mhc.sinkhorn_bwd")) {
          m.run(impl);
          test::expect_near(test::doubles_of(m.comb), map_of(rule, logits), 5e-7, impl);
          double largest = 1e-3;  // with one stream the gradient is nothing but rounding
          for (const double x : gradient) largest = std::max(largest, std::fabs(x));
          for (size_t i = 0; i < gradient.size(); ++i) {
            EXPECT_NEAR(m.grad_logits.get(static_cast<int64_t>(i)), gradient[i], 2e-6 * largest)
                << impl << " " << i;
          }
        }
      }
    }
  }
}

// --- values --------------------------------------------------------------------------------------

// A map that is printed elsewhere, for 10 rounds.
TEST(Sinkhorn, GivesThePrintedMap) {
  const Doubles logits = {-1.1258398, -1.1523602, -0.2505786, -0.4338788, 0.8487103, 0.6920093,
                          -0.3160128, -2.1152196, 0.322275,   -1.2633348, 0.3499832, 0.3081339,
                          0.1198415,  1.2376579,  1.1167772,  -0.2472777};
  const Doubles expected = {0.078159,  0.0687967, 0.3554636, 0.4975992, 0.5682985, 0.38556,
                            0.0437015, 0.0024172, 0.2919925, 0.0113706, 0.2437905, 0.4528599,
                            0.0615492, 0.5342717, 0.3570434, 0.0471227};
  Maps m(1, 4);
  m.repeat = 10;
  for (int64_t i = 0; i < 16; ++i) {
    m.logits.set(i, 2 * static_cast<float>(logits[static_cast<size_t>(i)]));
  }
  for (const std::string& impl : implementations("mhc.sinkhorn_fwd")) {
    m.run(impl);
    test::expect_near(test::doubles_of(m.comb), expected, 1e-6, impl);
  }
}

// comb is the transpose of H_res, so the softmax over rows is the first column step of the paper's
// iteration on H_res: `repeat` counts what the paper counts.
TEST(Sinkhorn, RepeatIsThePapersCount) {
  for (const int64_t repeat : {1, 2, 10, 20}) {
    Maps m(1, 4);
    m.repeat = repeat;
    m.eps = 0;
    double h[4][4];
    for (int64_t i = 0; i < 4; ++i) {
      for (int64_t o = 0; o < 4; ++o) h[o][i] = std::exp(m.logits.get(i * 4 + o));
    }
    for (int64_t round = 0; round < repeat; ++round) {
      for (int c = 0; c < 4; ++c) {
        const double sum = h[0][c] + h[1][c] + h[2][c] + h[3][c];
        for (auto& row : h) row[c] /= sum;
      }
      for (auto& row : h) {
        const double sum = row[0] + row[1] + row[2] + row[3];
        for (double& x : row) x /= sum;
      }
    }
    for (const std::string& impl : implementations("mhc.sinkhorn_fwd")) {
      m.run(impl);
      for (int64_t i = 0; i < 4; ++i) {
        for (int64_t o = 0; o < 4; ++o) EXPECT_NEAR(m.comb.get(i * 4 + o), h[o][i], 4e-7) << impl;
      }
    }
  }
}

TEST(Sinkhorn, LinesSumToOneAsFarAsEpsAndRepeatGo) {
  for (const SinkhornConvention convention : kConventions) {
    for (const std::string& impl : implementations("mhc.sinkhorn_fwd")) {
      Maps m(40, 4);
      m.convention = convention;
      m.repeat = 40;
      m.run(impl);
      for (int64_t t = 0; t < m.T; ++t) {
        for (int64_t line = 0; line < 4; ++line) {
          EXPECT_NEAR(m.line(t, line, false), 1, 2e-6) << impl;
          EXPECT_NEAR(m.line(t, line, true), 1, 1e-5) << impl;
        }
      }
    }
  }
}

// --- bits ----------------------------------------------------------------------------------------

TEST(Sinkhorn, ThreadsAndLayoutsChangeNoBit) {
  for (const int64_t n : {1, 3, 4, 8}) {
    for (const SinkhornConvention convention : kConventions) {
      for (const std::string& impl : implementations("mhc.sinkhorn_fwd")) {
        Maps m(130, n);
        m.convention = convention;
        m.run(impl);
        for (int threads = 2; threads <= 8; ++threads) {
          Maps other(130, n);
          other.convention = convention;
          other.run(impl, threads);
          EXPECT_EQ(other.bits(), m.bits()) << impl << " " << threads;
        }
        for (const Layout& layout : test::kLayouts) {
          Maps other(130, n, 1, layout);
          other.convention = convention;
          other.run(impl);
          EXPECT_EQ(other.bits(), m.bits()) << impl << " " << layout.row_padding;
        }
      }
    }
  }
}

// Tokens share vectors, and a token of tiny values makes all of its vector divide in another way:
// the quotients must be the same ones. `spread` brings values of every size along.
TEST(Sinkhorn, ATokenDependsOnItselfAlone) {
  for (const int64_t n : {2, 4, 5}) {
    for (const float spread : {1.0F, 4.0F, 20.0F}) {
      for (const SinkhornConvention convention : kConventions) {
        for (const std::string& impl : implementations("mhc.sinkhorn_fwd")) {
          Maps whole(33, n, spread);
          whole.convention = convention;
          whole.eps = convention == SinkhornConvention::deepseek ? 1e-6 : 0;
          whole.run(impl);
          for (int64_t t = 0; t < whole.T; ++t) {
            Maps one(1, n);
            one.convention = convention;
            one.eps = whole.eps;
            for (int64_t i = 0; i < n * n; ++i) {
              one.logits.set(i, whole.logits.get(t * n * n + i));
              one.grad.set(i, whole.grad.get(t * n * n + i));
            }
            one.run(impl);
            EXPECT_EQ(one.comb.bits(), whole.comb.bits(t, t + 1)) << impl << " " << t;
            EXPECT_EQ(one.grad_logits.bits(), whole.grad_logits.bits(t, t + 1)) << impl << " " << t;
          }
        }
      }
    }
  }
}

// Thousands of maps alone among ordinary ones, and each beside one whose tiny values rule the fast
// division out.
TEST(Sinkhorn, FastAndTrueDivisionAgree) {
  for (const std::string& impl : implementations("mhc.sinkhorn_fwd")) {
    if (impl == "cpu.generic" || impl.starts_with("reference")) continue;  // have one division
    for (const SinkhornConvention convention :
         {SinkhornConvention::deepseek, SinkhornConvention::megatron}) {
      Maps ordinary(16000, 4, 2);
      ordinary.convention = convention;
      ordinary.eps = 1e-20;
      ordinary.run(impl);
      Maps mixed(16000, 4, 2);
      mixed.convention = convention;
      mixed.eps = 1e-20;
      for (int64_t t = 0; t < mixed.T; t += 8) {
        for (int64_t i = 0; i < 16; ++i) mixed.logits.set(t * 16 + i, i % 5 == 0 ? 0.0F : -80.0F);
      }
      mixed.run(impl);
      for (int64_t t = 0; t < mixed.T; ++t) {
        if (t % 8 == 0) continue;
        ASSERT_EQ(mixed.comb.bits(t, t + 1), ordinary.comb.bits(t, t + 1)) << impl << " " << t;
      }
    }
  }
}

// Half-steps are true divisions and their order is fixed, so only exp may differ.
TEST(Sinkhorn, KernelsAgreeOnAnIntegerMap) {
  // Equal logits: exp(0) = 1 in every implementation.
  Maps m(3, 4);
  m.logits.fill(0.25F);
  std::string want;
  for (const std::string& impl : test::exact_implementations("mhc.sinkhorn_fwd")) {
    m.run(impl);
    if (want.empty()) want = m.bits();
    EXPECT_EQ(m.bits(), want) << impl;
  }
}

// --- edges ---------------------------------------------------------------------------------------

// Far below its row's maximum a softmax is 0: the entry still is positive, its gradient is 0.
TEST(Sinkhorn, LargeGapsSaturate) {
  for (const std::string& impl : implementations("mhc.sinkhorn_fwd")) {
    Maps m(2, 4);
    for (int64_t i = 0; i < 4; ++i) m.logits.set(i * 4, 200);
    m.run(impl);
    for (int64_t i = 0; i < 16; ++i) {
      EXPECT_GT(m.comb.get(i), 0) << impl << " " << i;
      // In double e^-200 is a number still.
      const float most = i % 4 == 0 ? kInf : 1e-30F;
      EXPECT_LE(std::fabs(m.grad_logits.get(i)), most) << impl << " " << i;
    }
  }
}

// Without eps the linear form divides 0 by 0 where the form on logarithms is at ease.
TEST(Sinkhorn, LogarithmsStandSpikyLogits) {
  for (const std::string& impl : implementations("mhc.sinkhorn_fwd")) {
    Maps m(1, 4);
    m.convention = SinkhornConvention::log;
    m.repeat = 64;
    for (int64_t i = 0; i < 4; ++i) {
      for (int64_t o = 0; o < 4; ++o) m.logits.set(i * 4 + o, o == 0 ? 300.0F : -30.0F * o - i);
    }
    m.run(impl);
    for (int64_t line = 0; line < 4; ++line) EXPECT_NEAR(m.line(0, line, false), 1, 1e-5) << impl;
    for (int64_t i = 0; i < 16; ++i) EXPECT_TRUE(std::isfinite(m.grad_logits.get(i))) << impl;
  }
}

TEST(Sinkhorn, NanAndInfinityStayInTheirToken) {
  for (const SinkhornConvention convention : kConventions) {
    for (const float bad : {kNan, kInf}) {
      for (const std::string& impl : implementations("mhc.sinkhorn_fwd")) {
        Maps m(3, 4);
        m.convention = convention;
        m.logits.set(16 + 6, bad);
        m.run(impl);
        for (int64_t i = 0; i < 48; ++i) {
          EXPECT_EQ(std::isnan(m.comb.get(i)), i / 16 == 1) << impl << " " << i;
          EXPECT_EQ(std::isnan(m.grad_logits.get(i)), i / 16 == 1) << impl << " " << i;
        }
      }
    }
  }
}

TEST(Sinkhorn, OneStreamIsOneUpToEps) {
  for (const SinkhornConvention convention : kConventions) {
    for (const std::string& impl : implementations("mhc.sinkhorn_fwd")) {
      Maps m(5, 1, 10);
      m.convention = convention;
      m.run(impl);
      for (int64_t t = 0; t < 5; ++t) EXPECT_NEAR(m.comb.get(t), 1, 2e-6) << impl;
    }
  }
}

TEST(Sinkhorn, NoTokensTouchNothing) {
  const Tensor none(nullptr, DType::f32, {0, 4, 4});
  for (const std::string& impl : implementations("mhc.sinkhorn_fwd")) {
    Context context = test::context_for(impl, 2);
    sinkhorn_fwd(context, {.comb_logits = none, .comb = none, .repeat = 20, .eps = 1e-6});
    sinkhorn_bwd(context, {.grad_comb = none,
                           .comb_logits = none,
                           .grad_comb_logits = none,
                           .repeat = 20,
                           .eps = 1e-6});
  }
}

TEST(Sinkhorn, RefusesWhatTheContractForbids) {
  const Maps m(3, 4);
  const auto refused = [&](const std::function<void(SinkhornForward&)>& change) {
    SinkhornForward p = m.forward();
    change(p);
    Context context = Context::cpu(1);
    return error_of([&] { sinkhorn_fwd(context, p); });
  };
  EXPECT_EQ(refused([](SinkhornForward&) {}), "none");
  EXPECT_EQ(refused([](SinkhornForward& p) { p.repeat = 0; }),
            "mhc.sinkhorn_fwd: attribute 'repeat': expected in [1,64], got 0");
  EXPECT_EQ(refused([](SinkhornForward& p) { p.repeat = 65; }),
            "mhc.sinkhorn_fwd: attribute 'repeat': expected in [1,64], got 65");
  EXPECT_EQ(refused([](SinkhornForward& p) { p.repeat = {}; }),
            "mhc.sinkhorn_fwd: attribute 'repeat': expected a value, got none");
  EXPECT_EQ(refused([](SinkhornForward& p) { p.eps = -1e-6; }),
            "mhc.sinkhorn_fwd: attribute 'eps': expected a finite number >= 0, got -1e-06");
  for (const int64_t n : {0, 9}) {
    const Array logits(DType::f32, {3, n, n});
    const std::string size = std::to_string(n);
    EXPECT_EQ(refused([&](SinkhornForward& p) { p.comb_logits = logits; }),
              "mhc.sinkhorn_fwd: tensor 'comb_logits': expected n in [1,8], got F32[3," + size +
                  "," + size + "]");
  }
  const Array oblong(DType::f32, {3, 4, 5});
  EXPECT_EQ(refused([&](SinkhornForward& p) { p.comb_logits = oblong; }),
            "mhc.sinkhorn_fwd: tensor 'comb_logits': expected F32[3,4,4], got F32[3,4,5]");
  EXPECT_EQ(refused([](SinkhornForward& p) { p.comb = p.comb_logits; }),
            "mhc.sinkhorn_fwd: tensor 'comb': expected memory apart from 'comb_logits', got "
            "overlapping memory");
}

}  // namespace
}  // namespace ehc::mhc
