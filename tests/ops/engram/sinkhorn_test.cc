#include "ehc/engram/sinkhorn.h"

#include <array>
#include <cmath>

#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::Array;
using test::context_for;
using test::error_of;
using test::expect_close;
using test::implementations;
using test::kInf;
using test::kNan;
using test::Layout;
using test::workspace_for;

struct Scaled {
  Array update;
  Array row_scale;
  Array col_scale;
};

Scaled scaled(int64_t rows, int64_t width, uint32_t seed) {
  Scaled x{Array::random(DType::f32, {rows, width}, seed),
           Array::random(DType::f32, {rows}, seed + 1, 1, 0.2F),
           Array::random(DType::f32, {width}, seed + 2, 1, 0.2F)};
  return x;
}

Scaled unscaled(Array update) {
  const Tensor t = update.view();
  Scaled x{std::move(update), Array(DType::f32, {t.shape[0]}), Array(DType::f32, {t.shape[1]})};
  x.row_scale.fill(1);
  x.col_scale.fill(1);
  return x;
}

struct Step {
  Array row_norm;
  Array row_scale;
  Array col_partial;
};

Step run_step(const std::string& impl, const Scaled& x, double eps, int threads = 1,
              Layout layout = {}) {
  const Tensor t = x.update.view();
  Step out{Array(DType::f32, {t.shape[0]}, {0, layout.offset}),
           Array(DType::f32, {t.shape[0]}, {0, layout.offset}),
           Array(DType::f32, {sinkhorn_partials(t.shape[0]), t.shape[1]}, layout)};
  const Array update = x.update.copy(layout);
  const Array row_scale = x.row_scale.copy({0, layout.offset});
  const Array col_scale = x.col_scale.copy({0, layout.offset});
  const SinkhornStep call = {.update = update,
                             .row_scale = row_scale,
                             .col_scale = col_scale,
                             .row_norm = out.row_norm,
                             .new_row_scale = out.row_scale,
                             .col_partial = out.col_partial,
                             .eps = eps};
  Context context = context_for(impl, threads);
  const Buffer workspace = workspace_for(context, call);
  sinkhorn_step(context, call);
  return out;
}

// The column step after it; returns the sums of squares.
Array run_reduce(const std::string& impl, const Step& step, Array& col_scale, double eps) {
  Array sums(DType::f32, {col_scale.size()});
  Context context = context_for(impl);
  sinkhorn_step_reduce(context, {.col_partial = step.col_partial,
                                 .col_scale = col_scale,
                                 .col_sumsq = sums,
                                 .new_col_scale = col_scale,
                                 .eps = eps});
  return sums;
}

Array run_finalize(const std::string& impl, const Scaled& x, double eps, double alpha,
                   int threads = 1) {
  const Tensor t = x.update.view();
  Array out(DType::f32, {t.shape[0], t.shape[1]});
  Context context = context_for(impl, threads);
  sinkhorn_finalize(context, {.update = x.update,
                              .row_scale = x.row_scale,
                              .col_scale = x.col_scale,
                              .out = out,
                              .eps = eps,
                              .alpha = alpha});
  return out;
}

const std::vector<int64_t> kRows = {0, 1, 2, 31, 33, 100, 4300};
const std::vector<int64_t> kWidths = {1, 7, 64, 96, 257, 576, 1000};

TEST(Sinkhorn, PartialsDependOnTheNumberOfRowsAlone) {
  EXPECT_EQ(sinkhorn_partials(0), 0);
  EXPECT_EQ(sinkhorn_partials(1), 1);
  EXPECT_EQ(sinkhorn_partials(32), 1);
  EXPECT_EQ(sinkhorn_partials(33), 2);
  EXPECT_EQ(sinkhorn_partials(4096), 128);
  EXPECT_EQ(sinkhorn_partials(4097), 125);  // chunks of 33
  EXPECT_EQ(sinkhorn_partials(1'000'000'000), 128);
}

TEST(Sinkhorn, StepAgreesWithTheReference) {
  for (const int64_t rows : kRows) {
    for (const int64_t width : kWidths) {
      if (rows * width > 300'000) continue;
      const Scaled x = scaled(rows, width, static_cast<uint32_t>(rows * width + 1));
      const Step want = run_step("reference", x, 1e-20);
      for (const std::string& impl : implementations("engram.sinkhorn_step")) {
        const std::string what = impl + " " + std::to_string(rows) + "x" + std::to_string(width);
        const Step got = run_step(impl, x, 1e-20);
        expect_close(impl, got.row_norm, want.row_norm, what + " row_norm");
        expect_close(impl, got.row_scale, want.row_scale, what + " row_scale");
        expect_close(impl, got.col_partial, want.col_partial, what + " col_partial");
        for (const auto& [threads, layout] :
             {std::pair{2, Layout{}}, {3, Layout{5, 1}}, {8, Layout{16, 0}}}) {
          const Step again = run_step(impl, x, 1e-20, threads, layout);
          EXPECT_EQ(again.row_norm.bits(), got.row_norm.bits()) << what;
          EXPECT_EQ(again.row_scale.bits(), got.row_scale.bits()) << what;
          EXPECT_EQ(again.col_partial.bits(), got.col_partial.bits()) << what;
        }
      }
    }
  }
}

TEST(Sinkhorn, ARowDoesNotKnowTheOthers) {
  const Scaled x = scaled(50, 131, 5);
  for (const std::string& impl : implementations("engram.sinkhorn_step")) {
    const Step all = run_step(impl, x, 1e-20);
    for (const int64_t r : {0, 31, 32, 49}) {
      Scaled one{Array(DType::f32, {1, 131}), Array(DType::f32, {1}), x.col_scale.copy()};
      for (int64_t j = 0; j < 131; ++j) one.update.set(j, x.update.get(r * 131 + j));
      one.row_scale.set(0, x.row_scale.get(r));
      const Step alone = run_step(impl, one, 1e-20);
      EXPECT_EQ(alone.row_norm.bits(), all.row_norm.bits(r, r + 1)) << impl;
      EXPECT_EQ(alone.row_scale.bits(), all.row_scale.bits(r, r + 1)) << impl;
    }
  }
}

TEST(Sinkhorn, ReduceAddsInAscendingOrder) {
  for (const int64_t partials : {0, 1, 3, 128}) {
    for (const int64_t width : kWidths) {
      Array squares = Array::random(DType::f32, {partials, width}, 3, 5, 1);
      for (int64_t p = 0; p < partials; ++p) squares.set(p * width, 0);  // a column of zeros
      const Array scale = Array::random(DType::f32, {width}, 4, 1, 0.2F);
      for (const std::string& impl : implementations("engram.sinkhorn_step_reduce")) {
        if (impl == "reference") continue;  // adds in double
        Array sums(DType::f32, {width});
        Array moved(DType::f32, {width});
        Array only(DType::f32, {width});
        Context context = context_for(impl, 3);
        sinkhorn_step_reduce(context, {.col_partial = squares.copy({3, 1}),
                                       .col_scale = scale,
                                       .col_sumsq = sums,
                                       .new_col_scale = moved,
                                       .eps = 1e-3});
        sinkhorn_step_reduce(context, {.col_partial = squares, .col_sumsq = only});
        EXPECT_EQ(only.bits(), sums.bits());
        for (int64_t j = 0; j < width; ++j) {
          float sum = 0;
          for (int64_t p = 0; p < partials; ++p) sum += squares.get(p * width + j);
          const float want = sum == 0 ? scale.get(j) : scale.get(j) / (std::sqrt(sum) + 1e-3F);
          ASSERT_EQ(sums.get(j), sum) << impl << " P " << partials << " column " << j;
          ASSERT_EQ(moved.get(j), want) << impl << " P " << partials << " column " << j;
        }
      }
    }
  }
}

TEST(Sinkhorn, FinalizeGivesRowsOfNormAlpha) {
  for (const int64_t rows : {0, 1, 31, 100}) {
    for (const int64_t width : kWidths) {
      Scaled x = scaled(rows, width, 8);
      if (rows > 3) x.row_scale.set(2, 0);
      const Array want = run_finalize("reference", x, 1e-20, 3.5);
      for (const std::string& impl : implementations("engram.sinkhorn_finalize")) {
        const std::string what = impl + " " + std::to_string(rows) + "x" + std::to_string(width);
        const Array out = run_finalize(impl, x, 1e-20, 3.5);
        expect_close(impl, out, want, what);
        EXPECT_EQ(run_finalize(impl, x, 1e-20, 3.5, 8).bits(), out.bits()) << what;
        Array in_place = x.update.copy();
        Context context = context_for(impl, 2);
        sinkhorn_finalize(context, {.update = in_place,
                                    .row_scale = x.row_scale,
                                    .col_scale = x.col_scale,
                                    .out = in_place,
                                    .eps = 1e-20,
                                    .alpha = 3.5});
        EXPECT_EQ(in_place.bits(), out.bits()) << what;
        for (int64_t r = 0; r < rows; ++r) {
          double squares = 0;
          for (int64_t j = 0; j < width; ++j) squares += std::pow(out.get(r * width + j), 2);
          EXPECT_NEAR(std::sqrt(squares), rows > 3 && r == 2 ? 0 : 3.5, 1e-5) << what;
        }
      }
    }
  }
}

// Rows and columns of zeros, with eps so small that its reciprocal squared leaves fp32.
TEST(Sinkhorn, ZerosStayZeros) {
  for (const double eps : {1e-20, 1e-44}) {
    for (const std::string& impl : implementations("engram.sinkhorn_step")) {
      Scaled x = unscaled(Array::random(DType::f32, {40, 70}, 9));
      for (int64_t i = 0; i < x.update.size(); ++i) {
        if (i / 70 == 3 || i / 70 == 39 || i % 70 == 5 || i % 70 == 69) x.update.set(i, 0);
      }
      x.row_scale.set(3, 0);
      x.row_scale.set(39, 0);
      for (int k = 0; k < 64; ++k) {
        const Step step = run_step(impl, x, eps);
        x.row_scale = step.row_scale.copy();
        run_reduce(impl, step, x.col_scale, eps);
      }
      const Array out = run_finalize(impl, x, eps, 8);
      for (int64_t i = 0; i < out.size(); ++i) {
        ASSERT_TRUE(std::isfinite(out.get(i))) << impl << " eps " << eps << " element " << i;
        ASSERT_EQ(out.get(i) == 0, x.update.get(i) == 0) << impl << " element " << i;
      }
      EXPECT_EQ(x.row_scale.get(3), 0);
      EXPECT_EQ(x.col_scale.get(5), 1);
    }
  }
}

// Squares of these leave the range of fp32, their norms do not.
TEST(Sinkhorn, VerySmallAndVeryLargeRows) {
  for (const std::string& impl : implementations("engram.sinkhorn_step")) {
    if (impl == "reference.f32") continue;
    Scaled x = unscaled(Array(DType::f32, {4, 37}));
    const float sizes[] = {1e-37F, 1e-25F, 1e19F, 1e37F};
    for (int64_t i = 0; i < x.update.size(); ++i) x.update.set(i, i % 3 == 0 ? 0 : sizes[i / 37]);
    const Step step = run_step(impl, x, 1e-44);
    const Array out = run_finalize(impl, x, 1e-44, 2);
    for (int64_t r = 0; r < 4; ++r) {
      double squares = 0;
      double scaled_squares = 0;
      for (int64_t j = r * 37; j < (r + 1) * 37; ++j) {
        squares += std::pow(double{x.update.get(j)}, 2);
        scaled_squares += std::pow(double{out.get(j)}, 2);
      }
      EXPECT_NEAR(step.row_norm.get(r) / std::sqrt(squares), 1, 1e-6) << impl << r;
      EXPECT_NEAR(std::sqrt(scaled_squares), 2, 1e-5) << impl << r;
    }
  }
}

TEST(Sinkhorn, NanAndInfFollowTheFormula) {
  const auto is_nan = [](float x) { return std::isnan(x); };
  for (const std::string& impl : implementations("engram.sinkhorn_step")) {
    for (const int64_t width : {3, 64, 71}) {
      Scaled x = unscaled(Array::random(DType::f32, {5, width}, 10));
      x.update.set(2 * width + 1, kNan);
      Step step = run_step(impl, x, 1e-20);
      for (int64_t r = 0; r < 5; ++r) {
        EXPECT_EQ(is_nan(step.row_norm.get(r)), r == 2) << impl;
        EXPECT_EQ(is_nan(step.row_scale.get(r)), r == 2) << impl;
      }
      for (int64_t j = 0; j < width; ++j) EXPECT_TRUE(is_nan(step.col_partial.get(j))) << impl;

      x.update.set(2 * width + 1, kInf);  // its row goes to 0, but inf * 0 is NaN
      step = run_step(impl, x, 1e-20);
      EXPECT_EQ(step.row_norm.get(2), kInf) << impl;
      EXPECT_EQ(step.row_scale.get(2), 0) << impl;
      for (int64_t j = 0; j < width; ++j) {
        EXPECT_EQ(is_nan(step.col_partial.get(j)), j == 1) << impl;
      }

      x.update.set(2 * width + 1, 1);  // an infinite scale of a row without zeros
      x.row_scale.set(2, kInf);
      step = run_step(impl, x, 1e-20);
      EXPECT_EQ(step.row_norm.get(2), kInf) << impl << " width " << width;
    }
  }
}

// A published script prints these for a 3 x 4 matrix, 8 rounds and alpha 2.
TEST(Sinkhorn, PrintedValuesOfTheIteration) {
  constexpr float kMatrix[] = {0.6613521575927734F, 0.266924113035202F,   0.06167725846171379F,
                               0.6213173270225525F, -0.4519059658050537F, -0.16613022983074188F,
                               -1.522768497467041F, 0.38168391585350037F, -1.0276086330413818F,
                               -0.563052773475647F, -0.8922905325889587F, -0.05825017765164375F};
  constexpr std::array<float, 4> kFirst = {1.02401F, 0.48524F, 1.10937F, 0.6966F};
  constexpr std::array<float, 4> kLast = {0.86589F, 0.86586F, 0.86646F, 0.8659F};
  constexpr float kNorms[] = {1.15488F, 1.15442F, 1.1548F};
  for (const std::string& impl : implementations("engram.sinkhorn_step")) {
    Scaled x = unscaled(Array(DType::f32, {3, 4}));
    for (int64_t i = 0; i < 12; ++i) x.update.set(i, kMatrix[i]);
    for (int k = 0; k < 8; ++k) {
      const Step step = run_step(impl, x, 1e-20);
      x.row_scale = step.row_scale.copy();
      const Array sums = run_reduce(impl, step, x.col_scale, 1e-20);
      for (size_t j = 0; j < 4 && (k == 0 || k == 7); ++j) {
        const float norm = std::sqrt(sums.get(static_cast<int64_t>(j)));
        EXPECT_NEAR(norm, k == 0 ? kFirst[j] : kLast[j], 1e-5) << impl << " round " << k;
      }
    }
    const Step last = run_step(impl, x, 1e-20);
    for (int64_t r = 0; r < 3; ++r) EXPECT_NEAR(last.row_norm.get(r), kNorms[r], 1.01e-5) << impl;
    EXPECT_NEAR(run_finalize(impl, x, 1e-20, 2).get(3), 1.482984F, 1e-6) << impl;
  }
}

TEST(Sinkhorn, RefusesWhatTheTablesForbid) {
  const Scaled x = scaled(40, 8, 11);
  Array norm(DType::f32, {40});
  Array scale(DType::f32, {40});
  Array partial(DType::f32, {3, 8});
  Array sums(DType::f32, {8});
  Context context = Context::cpu(1);
  EXPECT_EQ(error_of([&] {
              sinkhorn_step(context, {.update = x.update,
                                      .row_scale = x.row_scale,
                                      .col_scale = x.col_scale,
                                      .row_norm = norm,
                                      .new_row_scale = scale,
                                      .col_partial = partial,
                                      .eps = 1e-20});
            }),
            "engram.sinkhorn_step: tensor 'col_partial': expected F32[2,8], got F32[3,8]");
  EXPECT_EQ(error_of([&] {
              sinkhorn_step_reduce(context, {.col_partial = partial,
                                             .col_scale = x.col_scale,
                                             .col_sumsq = sums,
                                             .new_col_scale = sums.copy()});
            }),
            "engram.sinkhorn_step_reduce: attribute 'eps': expected a value with 'col_scale', got "
            "none");
  EXPECT_EQ(error_of([&] {
              sinkhorn_step_reduce(
                  context,
                  {.col_partial = partial, .col_scale = x.col_scale, .col_sumsq = sums, .eps = 1});
            }),
            "engram.sinkhorn_step_reduce: tensor 'col_scale': expected F32[8], got none");
}

}  // namespace
}  // namespace ehc::engram
