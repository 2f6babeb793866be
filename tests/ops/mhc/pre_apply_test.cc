#include "ehc/mhc/pre_apply.h"

#include "tests/ops/mhc/support.h"

namespace ehc::mhc {
namespace {

using test::Array;
using test::context_for;
using test::error_of;
using test::exact_implementations;
using test::implementations;
using test::kInf;
using test::kNan;
using test::Layout;
using Shape = test::StreamShape;

// Inputs of both calls and their outputs.
struct Collapse {
  Shape s;
  Array residual, pre, grad, target;
  Array layer_input, grad_residual, grad_pre;

  explicit Collapse(const Shape& shape, uint32_t seed = 1)
      : s(shape),
        residual(Array::random(s.type, {s.T, s.n, s.d}, seed)),
        pre(Array::random(DType::f32, {s.T, s.n}, seed + 1)),
        grad(Array::random(s.type, {s.T, s.d}, seed + 2)),
        target(Array::random(s.type, {s.T, s.n, s.d}, seed + 3)),
        layer_input(s.type, {s.T, s.d}),
        grad_residual(s.type, {s.T, s.n, s.d}),
        grad_pre(DType::f32, {s.T, s.n}) {}

  [[nodiscard]] PreApplyForward forward() const {
    return {.residual = residual, .pre = pre, .layer_input = layer_input};
  }
  [[nodiscard]] PreApplyBackward backward(bool adds = false) const {
    return {.grad_layer_input = grad,
            .residual = residual,
            .pre = pre,
            .grad_residual_acc = adds ? target.view() : Tensor(),
            .grad_residual = grad_residual,
            .grad_pre = grad_pre};
  }
  [[nodiscard]] std::string gradient_bits() const { return grad_residual.bits() + grad_pre.bits(); }
};

void run(const std::string& impl, const PreApplyForward& p, int threads = 1) {
  Context context = context_for(impl, threads);
  pre_apply_fwd(context, p);
}
void run(const std::string& impl, const PreApplyBackward& p, int threads = 1) {
  Context context = context_for(impl, threads);
  pre_apply_bwd(context, p);
}

// The contract's order, one element at a time.
Array collapsed(const Collapse& c) {
  Array out(c.s.type, {c.s.T, c.s.d});
  for (int64_t k = 0; k < out.size(); ++k) {
    const int64_t t = k / c.s.d;
    float sum = 0;
    for (int64_t i = 0; i < c.s.n; ++i) {
      sum = std::fma(c.pre.get(t * c.s.n + i), c.residual.get((t * c.s.n + i) * c.s.d + k % c.s.d),
                     sum);
    }
    out.set(k, sum);
  }
  return out;
}

Array gradient(const Collapse& c, bool adds) {
  Array out(c.s.type, {c.s.T, c.s.n, c.s.d});
  for (int64_t k = 0; k < out.size(); ++k) {
    const int64_t row = k / c.s.d;
    out.set(k, std::fma(c.pre.get(row), c.grad.get(row / c.s.n * c.s.d + k % c.s.d),
                        adds ? c.target.get(k) : 0.0F));
  }
  return out;
}

TEST(PreApply, EveryKernelGivesTheBitsOfTheFormula) {
  for (const Shape& s : test::stream_shapes()) {
    const Collapse c(s);
    const std::string want = collapsed(c).bits();
    for (const std::string& impl : exact_implementations("mhc.pre_apply_fwd")) {
      for (const Layout& layout : test::kLayouts) {
        const Array residual = c.residual.copy(layout);
        const Array pre = c.pre.copy(layout);
        const Array out(s.type, {s.T, s.d}, layout);
        run(impl, {.residual = residual, .pre = pre, .layer_input = out}, 3);
        EXPECT_EQ(out.bits(), want) << impl << " " << s;
      }
    }
  }
}

TEST(PreApplyBackward, EveryKernelGivesTheBitsOfTheFormula) {
  for (const Shape& s : test::stream_shapes()) {
    const Collapse c(s);
    const Collapse exact(s);
    run("reference", exact.backward());
    for (const std::string& impl : exact_implementations("mhc.pre_apply_bwd")) {
      SCOPED_TRACE(::testing::Message() << impl << " " << s);
      for (const bool adds : {false, true}) {
        run(impl, c.backward(adds));
        EXPECT_EQ(c.grad_residual.bits(), gradient(c, adds).bits()) << adds;
        // A sum that cancels is as exact as its terms are large.
        auto rule = cli::default_tolerance(exact.grad_pre);
        rule.abs = 1e-6 * static_cast<double>(s.d);
        EXPECT_TRUE(cli::compare(c.grad_pre, exact.grad_pre, rule, false).equal) << adds;
      }
      const std::string want = c.gradient_bits();
      for (const Layout& layout : test::kLayouts) {
        const Array grad = c.grad.copy(layout);
        const Array residual = c.residual.copy(layout);
        const Array pre = c.pre.copy(layout);
        const Array sum = c.target.copy(layout);  // in place
        const Array grad_pre(DType::f32, {s.T, s.n}, layout);
        run(impl,
            {.grad_layer_input = grad,
             .residual = residual,
             .pre = pre,
             .grad_residual_acc = sum,
             .grad_residual = sum,
             .grad_pre = grad_pre},
            3);
        EXPECT_EQ(sum.bits() + grad_pre.bits(), want) << "in place, " << layout.offset;
      }
    }
  }
}

// Few wide tokens are cut by columns; the sums of the backward pass are not.
TEST(PreApply, ThreadsChangeNoBit) {
  for (const Shape& s : {Shape{1, 4, 5003, DType::bf16}, Shape{3, 2, 2048, DType::f32},
                         Shape{37, 5, 96, DType::f16}}) {
    const Collapse c(s);
    for (const std::string& impl : implementations("mhc.pre_apply_fwd")) {
      run(impl, c.forward());
      run(impl, c.backward());
      const std::string want = c.layer_input.bits() + c.gradient_bits();
      for (int threads = 2; threads <= 8; ++threads) {
        const Collapse other(s);
        run(impl, other.forward(), threads);
        run(impl, other.backward(), threads);
        EXPECT_EQ(other.layer_input.bits() + other.gradient_bits(), want) << impl << " " << threads;
      }
    }
  }
}

TEST(PreApply, ATokenDependsOnItselfAlone) {
  for (const Shape& s : {Shape{7, 4, 257, DType::bf16}, Shape{7, 3, 64, DType::f32}}) {
    const Collapse whole(s);
    for (const std::string& impl : implementations("mhc.pre_apply_fwd")) {
      run(impl, whole.forward());
      run(impl, whole.backward(true));
      for (int64_t t = 0; t < s.T; ++t) {
        const Collapse one(s);
        run(impl, {.residual = one.residual.rows(t, t + 1),
                   .pre = one.pre.rows(t, t + 1),
                   .layer_input = one.layer_input.rows(0, 1)});
        run(impl, {.grad_layer_input = one.grad.rows(t, t + 1),
                   .residual = one.residual.rows(t, t + 1),
                   .pre = one.pre.rows(t, t + 1),
                   .grad_residual_acc = one.target.rows(t, t + 1),
                   .grad_residual = one.grad_residual.rows(0, 1),
                   .grad_pre = one.grad_pre.rows(0, 1)});
        EXPECT_EQ(one.layer_input.bits(0, 1), whole.layer_input.bits(t, t + 1)) << impl;
        EXPECT_EQ(one.grad_residual.bits(0, 1), whole.grad_residual.bits(t, t + 1)) << impl;
        EXPECT_EQ(one.grad_pre.bits(0, 1), whole.grad_pre.bits(t, t + 1)) << impl;
      }
    }
  }
}

TEST(PreApplyBackward, EqualsFiniteDifferences) {
  for (const int64_t n : {1, 2, 3, 4}) {
    Collapse c({3, n, 6, DType::f32});
    const auto loss = [&] {
      run("reference", c.forward());
      return test::inner_product(c.grad, c.layer_input);
    };
    const std::vector<double> of_residual = test::slopes(c.residual, loss);
    const std::vector<double> of_pre = test::slopes(c.pre, loss);
    for (const std::string& impl : implementations("mhc.pre_apply_bwd")) {
      run(impl, c.backward());
      test::expect_slopes(c.grad_residual, of_residual, impl);
      test::expect_slopes(c.grad_pre, of_pre, impl);
    }
  }
}

TEST(PreApply, NanAndInfinityStayInTheirColumnAndToken) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    for (const int64_t d : {7, 96, 257}) {
      for (const float bad : {kNan, kInf, -kInf}) {
        Collapse c({2, 4, d, type});
        c.residual.set(2 * d + d - 1, bad);  // token 0, stream 2, last column
        for (const std::string& impl : implementations("mhc.pre_apply_fwd")) {
          run(impl, c.forward());
          run(impl, c.backward());
          for (int64_t i = 0; i < 2 * d; ++i) {
            EXPECT_EQ(std::isfinite(c.layer_input.get(i)), i != d - 1) << impl << " " << i;
          }
          EXPECT_EQ(std::isnan(c.layer_input.get(d - 1)), std::isnan(bad)) << impl;
          for (int64_t i = 0; i < 8; ++i) {
            EXPECT_EQ(std::isfinite(c.grad_pre.get(i)), i != 2) << impl << " " << i;
          }
          for (int64_t i = 0; i < c.grad_residual.size(); ++i) {
            EXPECT_TRUE(std::isfinite(c.grad_residual.get(i))) << impl << " " << i;
          }
        }
      }
    }
  }
}

TEST(PreApply, NoTokensTouchNothing) {
  const Tensor none(nullptr, DType::bf16, {0, 4, 64});
  const Tensor row(nullptr, DType::bf16, {0, 64});
  const Tensor pre(nullptr, DType::f32, {0, 4});
  for (const std::string& impl : implementations("mhc.pre_apply_fwd")) {
    run(impl, {.residual = none, .pre = pre, .layer_input = row}, 2);
    run(impl,
        {.grad_layer_input = row,
         .residual = none,
         .pre = pre,
         .grad_residual_acc = none,
         .grad_residual = none,
         .grad_pre = pre},
        2);
  }
}

TEST(PreApply, RefusesWhatTheContractForbids) {
  const Collapse c({3, 4, 8, DType::bf16});
  const auto refused = [&](const std::function<void(PreApplyForward&)>& change) {
    PreApplyForward p = c.forward();
    change(p);
    return error_of([&] { run("", p); });
  };
  EXPECT_EQ(refused([](PreApplyForward&) {}), "none");
  for (const int64_t n : {0, 9}) {
    const Array residual(DType::bf16, {3, n, 8});
    EXPECT_EQ(refused([&](PreApplyForward& p) { p.residual = residual; }),
              "mhc.pre_apply_fwd: tensor 'residual': expected n in [1,8], got BF16[3," +
                  std::to_string(n) + ",8]");
  }
  const Array single(DType::f32, {3, 8});
  EXPECT_EQ(refused([&](PreApplyForward& p) { p.layer_input = single; }),
            "mhc.pre_apply_fwd: tensor 'layer_input': expected BF16[3,8], got F32[3,8]");
  EXPECT_EQ(refused([&](PreApplyForward& p) { p.layer_input = p.residual.select(1, 0); }),
            "mhc.pre_apply_fwd: tensor 'layer_input': expected memory apart from 'residual', got "
            "overlapping memory");

  PreApplyBackward p = c.backward(true);
  p.grad_residual = p.residual;
  EXPECT_EQ(error_of([&] { run("", p); }),
            "mhc.pre_apply_bwd: tensor 'grad_residual': expected memory apart from 'residual', got "
            "overlapping memory");
  p = c.backward(true);
  p.grad_residual_acc = single;
  EXPECT_EQ(error_of([&] { run("", p); }),
            "mhc.pre_apply_bwd: tensor 'grad_residual_acc': expected BF16[3,4,8], got F32[3,8]");
}

}  // namespace
}  // namespace ehc::mhc
