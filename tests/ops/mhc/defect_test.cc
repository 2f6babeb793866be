#include "ehc/mhc/defect.h"

#include "tests/ops/mhc/support.h"

namespace ehc::mhc {
namespace {

using test::Array;
using test::context_for;
using test::error_of;
using test::implementations;
using test::kNan;

struct Defects {
  Array row, column, bound;
};

Defects run(const std::string& impl, const Tensor& comb, int threads = 1) {
  const int64_t tokens = comb.shape[0];
  Defects d = {Array(DType::f32, {tokens}), Array(DType::f32, {tokens}),
               Array(DType::f32, {tokens})};
  Context context = context_for(impl, threads);
  defect(context,
         {.comb = comb, .row_defect = d.row, .column_defect = d.column, .spectral_bound = d.bound});
  return d;
}

TEST(Defect, MeasuresRowsAndColumns) {
  Array comb(DType::f32, {2, 2, 2});
  const float values[] = {0.5F, 0.75F, 0.5F, -1, 1, 0, 0, 1};
  for (int64_t i = 0; i < 8; ++i) comb.set(i, values[i]);
  for (const std::string& impl : implementations("mhc.defect")) {
    const Defects d = run(impl, comb);
    EXPECT_EQ(d.row.get(0), 1.5F) << "0.5 - 1, off 1 by 1.5";
    EXPECT_EQ(d.column.get(0), 1.25F) << "0.75 - 1, off 1 by 1.25";
    EXPECT_EQ(d.bound.get(0), std::sqrt(1.5F * 1.75F)) << "of absolute values";
    EXPECT_EQ(d.row.get(1), 0);
    EXPECT_EQ(d.column.get(1), 0);
    EXPECT_EQ(d.bound.get(1), 1);
  }
}

// |M v| <= bound |v| for any v.
TEST(Defect, BoundsTheGrowthOfAnyVector) {
  const Array comb = Array::random(DType::f32, {50, 5, 5}, 1);
  const Array vectors = Array::random(DType::f32, {50, 5}, 2);
  const Defects d = run("", comb);
  for (int64_t t = 0; t < 50; ++t) {
    double before = 0, after = 0;
    for (int64_t o = 0; o < 5; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < 5; ++i) {
        sum += static_cast<double>(comb.get((t * 5 + i) * 5 + o)) * vectors.get(t * 5 + i);
      }
      after += sum * sum;
      before += static_cast<double>(vectors.get(t * 5 + o)) * vectors.get(t * 5 + o);
    }
    EXPECT_LE(std::sqrt(after), std::sqrt(before) * d.bound.get(t) * (1 + 1e-6)) << t;
  }
}

TEST(Defect, NanStaysInItsToken) {
  Array comb = Array::random(DType::f32, {3, 4, 4}, 1);
  comb.set(16 + 7, kNan);
  for (const std::string& impl : implementations("mhc.defect")) {
    const Defects d = run(impl, comb);
    for (int64_t t = 0; t < 3; ++t) {
      EXPECT_EQ(std::isnan(d.row.get(t)), t == 1);
      EXPECT_EQ(std::isnan(d.column.get(t)), t == 1);
      EXPECT_EQ(std::isnan(d.bound.get(t)), t == 1);
    }
  }
}

TEST(Defect, LayoutAndThreadsChangeNoBit) {
  const Array comb = Array::random(DType::f32, {3000, 3, 3}, 1);
  for (const std::string& impl : implementations("mhc.defect")) {
    const Defects plain = run(impl, comb);
    const Array strided = comb.copy({.row_padding = 2, .offset = 1});
    const Defects other = run(impl, strided, 3);
    EXPECT_EQ(other.row.bits() + other.column.bits() + other.bound.bits(),
              plain.row.bits() + plain.column.bits() + plain.bound.bits());
    run(impl, Tensor(nullptr, DType::f32, {0, 4, 4}));
  }
}

TEST(Defect, RefusesOtherShapes) {
  const Array comb(DType::f32, {3, 4, 5});
  EXPECT_EQ(error_of([&] { run("", comb); }),
            "mhc.defect: tensor 'comb': expected F32[3,4,4], got F32[3,4,5]");
}

}  // namespace
}  // namespace ehc::mhc
