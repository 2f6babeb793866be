#include "ehc/mhc/norm_fn_bwd.h"

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

// `groups` 0: without that axis.
struct Gradients {
  int64_t T, n, d, M, G;
  DType type;
  Precision precision = Precision::fp32;
  Array grad_mul, grad_sqr, residual, fn, residual_target, fn_target, grad_residual, grad_fn;

  Gradients(int64_t tokens, int64_t streams, int64_t hidden, int64_t mixes, DType activation,
            int64_t groups = 0, Layout layout = {})
      : T(tokens),
        n(streams),
        d(hidden),
        M(mixes),
        G(groups),
        type(activation),
        grad_mul(Array::random(DType::f32,
                               G > 0 ? std::vector<int64_t>{T, G, M} : std::vector<int64_t>{T, M},
                               1)
                     .copy(layout)),
        grad_sqr(Array::random(DType::f32,
                               G > 0 ? std::vector<int64_t>{T, G} : std::vector<int64_t>{T}, 2)
                     .copy(layout)),
        residual(Array::random(type, {T, n, d}, 3).copy(layout)),
        fn(Array::random(DType::f32, {M, n * d}, 4).copy(layout)),
        residual_target(Array::random(type, {T, n, d}, 5).copy(layout)),
        fn_target(Array::random(DType::f32, {M, n * d}, 6).copy(layout)),
        grad_residual(type, {T, n, d}, layout),
        grad_fn(DType::f32, {M, n * d}, layout) {}

  [[nodiscard]] NormFnBackward params(bool adds = false) const {
    return {.grad_mul = grad_mul,
            .grad_sqr = grad_sqr,
            .residual = residual,
            .fn = fn,
            .grad_residual_acc = adds ? residual_target.view() : Tensor(),
            .grad_fn_acc = adds ? fn_target.view() : Tensor(),
            .grad_residual = grad_residual,
            .grad_fn = grad_fn,
            .precision = precision};
  }
  [[nodiscard]] std::string bits() const { return grad_residual.bits() + grad_fn.bits(); }
};

std::vector<std::string> kernels() { return implementations("mhc.norm_fn_bwd"); }

void run(const std::string& impl, const NormFnBackward& p, int threads = 1) {
  test::run_on(
      impl, [](Context& c, const auto& q) { norm_fn_bwd(c, q); }, p, threads);
}

// The contract's order, one element at a time; sums over tokens in chunks of 48.
TEST(NormFnBackward, EveryKernelGivesTheBitsOfTheFormula) {
  for (const auto& [T, n, d, M, G] : {std::tuple<int, int, int, int, int>{1, 4, 33, 24, 0},
                                      {100, 4, 31, 24, 0},
                                      {49, 2, 64, 8, 1},
                                      {7, 4, 90, 5, 8},
                                      {5, 3, 7, 63, 3},
                                      {3, 1, 600, 3, 0}}) {
    for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
      for (const bool adds : {false, true}) {
        const Gradients g(T, n, d, M, type, G, {.row_padding = 3, .offset = 1});
        const int64_t K = g.n * d;
        const int64_t groups = std::max(1, G);
        for (const std::string& impl : test::exact_implementations("mhc.norm_fn_bwd")) {
          SCOPED_TRACE(::testing::Message() << impl << " T=" << T << " K=" << K << " M=" << M);
          run(impl, g.params(adds), 3);
          for (int64_t k = 0; k < K; ++k) {
            const int64_t group = k / (K / groups);
            for (int64_t t = 0; t < T; ++t) {
              float sum = 0;
              for (int64_t j = 0; j < M; ++j) {
                sum = std::fma(g.grad_mul.get((t * groups + group) * M + j), g.fn.get(j * K + k),
                               sum);
              }
              sum =
                  std::fma(2 * g.grad_sqr.get(t * groups + group), g.residual.get(t * K + k), sum);
              Array want(type, {1});
              want.set(0, (adds ? g.residual_target.get(t * K + k) : 0) + sum);
              ASSERT_EQ(g.grad_residual.get(t * K + k), want.get(0)) << t << " " << k;
            }
            for (int64_t j = 0; j < M; ++j) {
              float total = 0;
              for (int64_t first = 0; first < T; first += 48) {
                float sum = 0;
                for (int64_t t = first; t < std::min<int64_t>(T, first + 48); ++t) {
                  sum = std::fma(g.grad_mul.get((t * groups + group) * M + j),
                                 g.residual.get(t * K + k), sum);
                }
                total += sum;
              }
              ASSERT_EQ(g.grad_fn.get(j * K + k), (adds ? g.fn_target.get(j * K + k) : 0) + total)
                  << j << " " << k;
            }
          }
        }
      }
    }
  }
}

TEST(NormFnBackward, ThreadsAndPlaceChangeNoBit) {
  for (const DType type : {DType::bf16, DType::f32}) {
    for (const std::string& impl : kernels()) {
      const Gradients g(60, 4, 300, 24, type, 3);
      run(impl, g.params(true));
      for (int threads = 2; threads <= 8; ++threads) {
        const Gradients other(60, 4, 300, 24, type, 3, {.row_padding = 32, .offset = 0});
        NormFnBackward p = other.params(true);
        p.grad_residual = p.grad_residual_acc;
        p.grad_fn = p.grad_fn_acc;
        run(impl, p, threads);
        EXPECT_EQ(other.residual_target.bits() + other.fn_target.bits(), g.bits())
            << impl << " in place, " << threads;
      }
    }
  }
}

TEST(NormFnBackward, ATokenDependsOnItselfAlone) {
  for (const std::string& impl : kernels()) {
    const Gradients whole(9, 4, 70, 24, DType::bf16);
    run(impl, whole.params());
    for (int64_t t = 0; t < 9; ++t) {
      const Gradients one(1, 4, 70, 24, DType::bf16);
      NormFnBackward p = one.params();
      p.grad_mul = whole.grad_mul.rows(t, t + 1);
      p.grad_sqr = whole.grad_sqr.rows(t, t + 1);
      p.residual = whole.residual.rows(t, t + 1);
      run(impl, p);
      EXPECT_EQ(one.grad_residual.bits(), whole.grad_residual.bits(t, t + 1)) << impl << " " << t;
    }
  }
}

// The gradients of sum(grad_mul * x fn^T) + sum(grad_sqr * |x|^2).
TEST(NormFnBackward, EqualsFiniteDifferences) {
  for (const int64_t groups : {0, 2}) {
    const Gradients g(3, 2, 6, 5, DType::f32, groups);
    const int64_t K = 12;
    const int64_t G = std::max<int64_t>(1, groups);
    Doubles x = test::doubles_of(g.residual);
    const Doubles fn = test::doubles_of(g.fn);
    x.insert(x.end(), fn.begin(), fn.end());
    const Doubles slopes = test::slopes_of(x, [&](const Doubles& at) {
      double loss = 0;
      for (int64_t t = 0; t < 3; ++t) {
        for (int64_t k = 0; k < K; ++k) {
          const int64_t row = t * G + k / (K / G);
          const double value = at[static_cast<size_t>(t * K + k)];
          loss += g.grad_sqr.get(row) * value * value;
          for (int64_t j = 0; j < 5; ++j) {
            loss +=
                g.grad_mul.get(row * 5 + j) * value * at[static_cast<size_t>(3 * K + j * K + k)];
          }
        }
      }
      return loss;
    });
    for (const std::string& impl : kernels()) {
      run(impl, g.params());
      Doubles got = test::doubles_of(g.grad_residual);
      const Doubles of_fn = test::doubles_of(g.grad_fn);
      got.insert(got.end(), of_fn.begin(), of_fn.end());
      test::expect_near(got, slopes, 1e-6, impl);
    }
  }
}

TEST(NormFnBackward, Tf32RoundsFnAlone) {
  for (const std::string& impl : kernels()) {
    Gradients rounded(5, 4, 40, 24, DType::f32);
    Gradients plain(5, 4, 40, 24, DType::f32);
    rounded.precision = Precision::tf32;
    for (int64_t i = 0; i < plain.fn.size(); ++i) {
      plain.fn.set(i, round_to_tf32(plain.fn.get(i)));
    }
    run(impl, rounded.params());
    run(impl, plain.params());
    EXPECT_EQ(rounded.bits(), plain.bits()) << impl;
  }
}

TEST(NormFnBackward, NoTokensGiveZerosOrTheTarget) {
  for (const std::string& impl : kernels()) {
    Gradients g(0, 4, 8, 24, DType::bf16);
    g.grad_fn.fill(7);
    run(impl, g.params(), 2);
    for (int64_t i = 0; i < g.grad_fn.size(); ++i) ASSERT_EQ(g.grad_fn.get(i), 0) << impl;
    run(impl, g.params(true), 2);
    EXPECT_EQ(g.grad_fn.bits(), g.fn_target.bits()) << impl;
  }
}

TEST(NormFnBackward, NanAndInfinityStayInTheirColumn) {
  for (const float bad : {kNan, kInf}) {
    Gradients g(3, 2, 50, 24, DType::bf16);
    g.residual.set(100 + 70, bad);  // token 1, column 70
    for (const std::string& impl : kernels()) {
      run(impl, g.params());
      for (int64_t i = 0; i < 300; ++i) {
        EXPECT_EQ(std::isfinite(g.grad_residual.get(i)), i != 170) << impl << " " << i;
      }
      for (int64_t i = 0; i < g.grad_fn.size(); ++i) {
        EXPECT_EQ(std::isfinite(g.grad_fn.get(i)), i % 100 != 70) << impl << " " << i;
      }
    }
  }
}

TEST(NormFnBackward, RefusesWhatTheContractForbids) {
  const Gradients g(3, 4, 30, 24, DType::bf16);
  Context context = Context::cpu(1);
  const auto refused = [&](const std::function<void(NormFnBackward&)>& change) {
    NormFnBackward p = g.params(true);
    change(p);
    return error_of([&] { norm_fn_bwd(context, p); });
  };
  const Gradients uneven(3, 4, 30, 24, DType::bf16, 7);
  EXPECT_EQ(refused([&](NormFnBackward& p) {
              p.grad_mul = uneven.grad_mul, p.grad_sqr = uneven.grad_sqr;
            }),
            "mhc.norm_fn_bwd: tensor 'grad_mul': expected G that divides K = 120, got F32[3,7,24]");
  EXPECT_EQ(refused([&](NormFnBackward& p) { p.grad_sqr = uneven.grad_sqr; }),
            "mhc.norm_fn_bwd: tensor 'grad_sqr': expected F32[3], got F32[3,7]");
  EXPECT_EQ(refused([](NormFnBackward& p) { p.grad_residual = p.residual; }),
            "mhc.norm_fn_bwd: tensor 'grad_residual': expected memory apart from 'residual', got "
            "overlapping memory");
  EXPECT_EQ(refused([](NormFnBackward& p) { p.grad_fn = p.fn; }),
            "mhc.norm_fn_bwd: tensor 'grad_fn': expected memory apart from 'fn', got overlapping "
            "memory");
  const Array single(DType::f32, {3, 4, 30});
  EXPECT_EQ(refused([&](NormFnBackward& p) { p.grad_residual_acc = single; }),
            "mhc.norm_fn_bwd: tensor 'grad_residual_acc': expected BF16[3,4,30], got F32[3,4,30]");
  EXPECT_EQ(
      refused([](NormFnBackward&) {}).rfind("mhc.norm_fn_bwd: workspace: expected at least ", 0),
      0U);
}

}  // namespace
}  // namespace ehc::mhc
