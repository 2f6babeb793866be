#include "ehc/mhc/reduce_partials.h"

#include "ops/mhc/shared/pairwise_sum.h"
#include "ops/mhc/shared/rms_math.h"
#include "tests/ops/mhc/mix_support.h"

namespace ehc::mhc {
namespace {

using test::Array;
using test::context_for;
using test::Doubles;
using test::error_of;
using test::implementations;
using test::kInf;
using test::kNan;
using test::Layout;

// `groups` 0: without that axis.
struct Sums {
  int64_t S, T, G, M;
  int64_t k = 120;
  double eps = 1e-6;
  RmsForm form = RmsForm::mean;
  Array mul_partial, sqr_partial, mixes, mul, sqr, grad_mixes, grad_mul, grad_sqr;

  static std::vector<int64_t> shape(std::vector<int64_t> before, int64_t groups, int64_t last) {
    if (groups > 0) before.push_back(groups);
    if (last > 0) before.push_back(last);
    return before;
  }

  Sums(int64_t splits, int64_t tokens, int64_t groups, int64_t columns, Layout layout = {})
      : S(splits),
        T(tokens),
        G(groups),
        M(columns),
        mul_partial(Array::random(DType::f32, shape({S, T}, G, M), 1).copy(layout)),
        sqr_partial(Array::random(DType::f32, shape({S, T}, G, 0), 2, 40).copy(layout)),
        mixes(DType::f32, {T, M}, layout),
        mul(DType::f32, shape({T}, G, M), layout),
        sqr(DType::f32, shape({T}, G, 0), layout),
        grad_mixes(Array::random(DType::f32, {T, M}, 3).copy(layout)),
        grad_mul(DType::f32, shape({T}, G, M), layout),
        grad_sqr(DType::f32, shape({T}, G, 0), layout) {}

  [[nodiscard]] int64_t groups() const { return std::max<int64_t>(1, G); }
  [[nodiscard]] ReducePartialsForward forward() const {
    return {.mul_partial = mul_partial,
            .sqr_partial = sqr_partial,
            .mixes = mixes,
            .mul = mul,
            .sqr = sqr,
            .k = k,
            .norm_eps = eps,
            .rms = form};
  }
  [[nodiscard]] ReducePartialsBackward backward() const {
    return {.grad_mixes = grad_mixes,
            .mul = mul,
            .sqr = sqr,
            .grad_mul = grad_mul,
            .grad_sqr = grad_sqr,
            .k = k,
            .norm_eps = eps,
            .rms = form};
  }
  void run(const std::string& impl, int threads = 1) const {
    Context context = context_for(impl, threads);
    reduce_partials_fwd(context, forward());
    reduce_partials_bwd(context, backward());
  }
  [[nodiscard]] std::string bits() const {
    return mixes.bits() + mul.bits() + sqr.bits() + grad_mul.bits() + grad_sqr.bits();
  }
};

std::vector<std::string> kernels() { return implementations("mhc.reduce_partials_fwd"); }

// Levels of adjacent pairs, as the contract puts it.
float tree(std::vector<float> values) {
  if (values.empty()) return 0;
  while (values.size() > 1) {
    std::vector<float> next;
    for (size_t i = 0; i + 1 < values.size(); i += 2) next.push_back(values[i] + values[i + 1]);
    if (values.size() % 2 == 1) next.push_back(values.back());
    values = next;
  }
  return values[0];
}

TEST(ReducePartials, AddsSplitsPairwise) {
  for (int64_t count = 0; count < 140; ++count) {
    const Array values = Array::random(DType::f32, {std::max<int64_t>(1, count)}, 7);
    std::vector<float> list;
    for (int64_t i = 0; i < count; ++i) list.push_back(values.get(i));
    EXPECT_EQ(pairwise_sum(count, 0.0F, [&](int64_t i) { return values.get(i); }), tree(list))
        << count;
  }
}

TEST(ReducePartials, EveryKernelGivesTheBitsOfTheFormula) {
  for (const int64_t splits : {0, 1, 2, 3, 6, 16, 65}) {
    for (const int64_t groups : {0, 1, 3}) {
      for (const int64_t columns : {1, 4, 24, 80}) {
        for (const RmsForm form : {RmsForm::mean, RmsForm::norm}) {
          Sums s(splits, 5, groups, columns, {.row_padding = 3, .offset = 1});
          s.form = form;
          for (const std::string& impl : test::exact_implementations("mhc.reduce_partials_fwd")) {
            s.run(impl);
            for (int64_t t = 0; t < 5; ++t) {
              for (int64_t j = 0; j < columns; ++j) {
                float mixed = 0;
                for (int64_t g = 0; g < s.groups(); ++g) {
                  std::vector<float> products, squares;
                  const int64_t at = t * s.groups() + g;
                  for (int64_t i = 0; i < splits; ++i) {
                    const int64_t from = i * 5 * s.groups() + at;
                    products.push_back(s.mul_partial.get(from * columns + j));
                    squares.push_back(s.sqr_partial.get(from));
                  }
                  const Rms rms = {s.k / s.groups(), 1e-6F, form == RmsForm::norm};
                  const float factor = rms_factor(rms, tree(squares));
                  mixed = std::fma(tree(products), factor, mixed);
                  ASSERT_EQ(s.mul.get(at * columns + j), tree(products)) << impl;
                  ASSERT_EQ(s.sqr.get(at), tree(squares)) << impl;
                  ASSERT_EQ(s.grad_mul.get(at * columns + j),
                            s.grad_mixes.get(t * columns + j) * factor)
                      << impl;
                }
                ASSERT_EQ(s.mixes.get(t * columns + j), mixed) << impl;
              }
            }
          }
        }
      }
    }
  }
}

TEST(ReducePartials, ThreadsAndLayoutsChangeNoBit) {
  for (const std::string& impl : kernels()) {
    const Sums s(5, 1100, 2, 24);
    s.run(impl);
    for (int threads = 2; threads <= 8; ++threads) {
      const Sums other(5, 1100, 2, 24);
      other.run(impl, threads);
      EXPECT_EQ(other.bits(), s.bits()) << impl << " " << threads;
    }
    for (const Layout& layout : test::kLayouts) {
      const Sums other(5, 1100, 2, 24, layout);
      other.run(impl);
      EXPECT_EQ(other.bits(), s.bits()) << impl << " " << layout.row_padding;
    }
  }
}

// One group as an axis of its own or none: the same numbers.
TEST(ReducePartials, AGroupOfOneIsNoGroup) {
  for (const std::string& impl : kernels()) {
    const Sums with(3, 4, 1, 24);
    const Sums without(3, 4, 0, 24);
    with.run(impl);
    without.run(impl);
    EXPECT_EQ(with.bits(), without.bits()) << impl;
  }
}

// The loss sum(grad * mixes) of mul, then sqr.
double loss_of(const Sums& s, const Doubles& x) {
  double loss = 0;
  for (int64_t t = 0; t < s.T; ++t) {
    for (int64_t g = 0; g < s.groups(); ++g) {
      const int64_t at = t * s.groups() + g;
      const double q = x[static_cast<size_t>(s.T * s.groups() * s.M + at)];
      const double mean = q / static_cast<double>(s.k / s.groups());
      const double r =
          s.form == RmsForm::mean ? 1 / std::sqrt(mean + s.eps) : 1 / (std::sqrt(mean) + s.eps);
      for (int64_t j = 0; j < s.M; ++j) {
        loss += s.grad_mixes.get(t * s.M + j) * x[static_cast<size_t>(at * s.M + j)] * r;
      }
    }
  }
  return loss;
}

TEST(ReducePartialsBackward, EqualsFiniteDifferences) {
  for (const RmsForm form : {RmsForm::mean, RmsForm::norm}) {
    for (const int64_t groups : {0, 3}) {
      for (const double eps : {1e-6, 0.5}) {
        Sums s(1, 2, groups, 5);
        s.form = form;
        s.eps = eps;
        s.run("reference");
        Doubles x = test::doubles_of(s.mul);
        const Doubles squares = test::doubles_of(s.sqr);
        x.insert(x.end(), squares.begin(), squares.end());
        const Doubles slopes =
            test::slopes_of(x, [&](const Doubles& at) { return loss_of(s, at); });
        for (const std::string& impl : kernels()) {
          s.run(impl);
          Doubles got = test::doubles_of(s.grad_mul);
          const Doubles of_sqr = test::doubles_of(s.grad_sqr);
          got.insert(got.end(), of_sqr.begin(), of_sqr.end());
          test::expect_near(got, slopes, 1e-6, impl);
        }
      }
    }
  }
}

// A token of zeros: r = 1/sqrt(eps) or 1/eps, no mixes, and a finite gradient.
TEST(ReducePartials, ZerosAreFinite) {
  for (const RmsForm form : {RmsForm::mean, RmsForm::norm}) {
    for (const double eps : {1e-6, 1e-20}) {
      Sums s(2, 2, 0, 24);
      s.form = form;
      s.eps = eps;
      s.mul_partial.fill(0);
      s.sqr_partial.fill(0);
      for (const std::string& impl : kernels()) {
        s.run(impl);
        const double r = form == RmsForm::mean ? 1 / std::sqrt(eps) : 1 / eps;
        for (int64_t i = 0; i < 48; ++i) {
          EXPECT_EQ(s.mixes.get(i), 0) << impl;
          EXPECT_NEAR(s.grad_mul.get(i) / (s.grad_mixes.get(i) * r), 1, 1e-5) << impl;
        }
        for (int64_t t = 0; t < 2; ++t) EXPECT_EQ(s.grad_sqr.get(t), 0) << impl;
      }
    }
  }
}

TEST(ReducePartials, NanAndInfinityStayInTheirToken) {
  for (const float bad : {kNan, kInf}) {
    Sums s(3, 3, 0, 24);
    s.sqr_partial.set(3 + 1, bad);  // split 1, token 1
    for (const std::string& impl : kernels()) {
      s.run(impl);
      for (int64_t i = 0; i < 72; ++i) {
        EXPECT_EQ(std::isnan(s.mixes.get(i)), i / 24 == 1 && std::isnan(bad)) << impl;
        const bool vanishes = i / 24 == 1 && std::isinf(bad);
        EXPECT_EQ(s.mixes.get(i) == 0, vanishes) << impl;
      }
    }
  }
}

TEST(ReducePartials, RefusesWhatTheContractForbids) {
  const auto error = [](const Sums& s) {
    Context context = Context::cpu(1);
    return error_of([&] { reduce_partials_fwd(context, s.forward()); });
  };
  Sums s(2, 3, 7, 24);
  EXPECT_EQ(error(s),
            "mhc.reduce_partials_fwd: attribute 'k': expected a multiple of G = 7, got 120");
  s.k = 0;
  EXPECT_EQ(error(s), "mhc.reduce_partials_fwd: attribute 'k': expected >= 1, got 0");
  s.k = 119;
  s.eps = 0;
  EXPECT_EQ(error(s),
            "mhc.reduce_partials_fwd: attribute 'norm_eps': expected a finite number > 0, got 0");
  s.eps = 1e-6;
  EXPECT_EQ(error(s), "none");

  Context context = Context::cpu(1);
  const Sums plain(2, 3, 0, 24);
  ReducePartialsForward p = s.forward();
  p.mul = plain.mul;  // without the axis G
  EXPECT_EQ(error_of([&] { reduce_partials_fwd(context, p); }),
            "mhc.reduce_partials_fwd: tensor 'mul': expected F32[3,7,24], got F32[3,24]");
  p = plain.forward();
  p.sqr = s.sqr;
  EXPECT_EQ(error_of([&] { reduce_partials_fwd(context, p); }),
            "mhc.reduce_partials_fwd: tensor 'sqr': expected F32[3], got F32[3,7]");
  p = plain.forward();
  p.sqr_partial = s.sqr_partial;
  EXPECT_EQ(error_of([&] { reduce_partials_fwd(context, p); }),
            "mhc.reduce_partials_fwd: tensor 'sqr_partial': expected F32[2,3], got F32[2,3,7]");
  p = plain.forward();
  p.mixes = p.mul;
  EXPECT_EQ(error_of([&] { reduce_partials_fwd(context, p); }),
            "mhc.reduce_partials_fwd: tensor 'mixes': expected memory apart from 'mul', got "
            "overlapping memory");
}

}  // namespace
}  // namespace ehc::mhc
