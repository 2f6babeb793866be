// The comparison rule behind `op --check`, `ehc check` and the golden files.
#include "cli/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/float_formats.h"

namespace ehc::cli {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

Tensor view(const std::vector<float>& v) {
  return Tensor(v.data(), DType::f32, {static_cast<int64_t>(v.size())});
}

Comparison compare_values(const std::vector<float>& got, const std::vector<float>& expected,
                          Tolerance tolerance) {
  return compare(view(got), view(expected), tolerance, false);
}

TEST(Compare, CountsUnitsInTheLastPlaceOfTheExpectedValue) {
  const float next = std::nextafter(1.0F, 2.0F);
  const Comparison c = compare_values({next}, {1.0F}, {1, 0, 1});
  EXPECT_TRUE(c.equal);
  EXPECT_EQ(c.max_ulp, 1);
  EXPECT_EQ(c.max_error, 0x1p-23);
  EXPECT_EQ(c.used, 1);
  EXPECT_FALSE(compare_values({std::nextafter(next, 2.0F)}, {1.0F}, {1, 0, 1}).equal);
  // The spacing of subnormals is that of the smallest normal numbers.
  EXPECT_TRUE(compare_values({0x1p-149F}, {0}, {1, 0, 1}).equal);
  EXPECT_FALSE(compare_values({0x1p-148F}, {0}, {1, 0, 1}).equal);
}

TEST(Compare, AddsTheAbsolutePart) {
  EXPECT_TRUE(compare_values({1.25F}, {1}, {0, 0.25, 1}).equal);
  EXPECT_FALSE(compare_values({1.5F}, {1}, {0, 0.25, 1}).equal);
  EXPECT_EQ(compare_values({1.5F, 1, 2}, {1, 1, 1}, {0, 0.25, 1}).failing, 2);
}

TEST(Compare, ShareBoundsHowManyElementsMissTheAbsolutePart) {
  const float next = std::nextafter(1.0F, 2.0F);
  const std::vector<float> expected(100, 1.0F);
  std::vector<float> got = expected;
  got[3] = next;
  EXPECT_TRUE(compare_values(got, expected, {1, 1e-9, 0.01}).equal);
  got[7] = next;
  const Comparison c = compare_values(got, expected, {1, 1e-9, 0.01});
  EXPECT_FALSE(c.equal);
  EXPECT_EQ(c.failing, 0);
  EXPECT_TRUE(compare_values(got, expected, {1, 1e-9, 0.011}).equal) << "rounded up to 2";
  EXPECT_TRUE(compare_values(got, expected, {1, 1e-6, 0.01}).equal);
}

TEST(Compare, NaNEqualsNaNAndNothingElse) {
  EXPECT_TRUE(compare_values({kNaN, 1}, {-kNaN, 1}, {0, 0, 1}).equal);
  for (const float other : {0.0F, 1.0F, kInf}) {
    const Comparison c = compare_values({kNaN}, {other}, {1e6, 1e6, 1});
    EXPECT_FALSE(c.equal) << other;
    EXPECT_FALSE(compare_values({other}, {kNaN}, {1e6, 1e6, 1}).equal) << other;
  }
  EXPECT_TRUE(std::isnan(compare_values({kNaN}, {1}, {1, 1, 1}).max_error));
}

TEST(Compare, InfinitiesEqualTheirOwnSign) {
  EXPECT_TRUE(compare_values({kInf, -kInf}, {kInf, -kInf}, {0, 0, 1}).equal);
  EXPECT_FALSE(compare_values({kInf}, {-kInf}, {4, 1, 1}).equal);
  EXPECT_FALSE(compare_values({kInf}, {3e38F}, {4, 1, 1}).equal);
  EXPECT_FALSE(compare_values({3e38F}, {kInf}, {4, 1, 1}).equal);
  EXPECT_FALSE(compare_values({3e38F}, {kInf}, {4, 1e30, 1}).equal);
}

TEST(Compare, ZeroToleranceMeansTheSameBits) {
  EXPECT_FALSE(compare_values({-0.0F}, {0.0F}, {0, 0, 1}).equal);
  EXPECT_TRUE(compare_values({-0.0F}, {0.0F}, {1, 0, 1}).equal);
  EXPECT_FALSE(compare_values({std::nextafter(1.0F, 2.0F)}, {1}, {0, 0, 1}).equal);
}

TEST(Compare, IntegersAreEqualOrNot) {
  const int64_t a[3] = {1, INT64_MIN, 1LL << 53};
  const int64_t b[3] = {1, INT64_MIN, (1LL << 53) + 1};
  const Comparison c = compare({b, DType::i64, {3}}, {a, DType::i64, {3}}, {4, 1, 1}, false);
  EXPECT_FALSE(c.equal);
  EXPECT_EQ(c.failing, 1);
  EXPECT_TRUE(compare({a, DType::i64, {3}}, {a, DType::i64, {3}}, {0, 0, 1}, false).equal);
}

TEST(Compare, ShapesAndTypesMustAgree) {
  const float x[4] = {};
  const Comparison shape = compare({x, DType::f32, {2, 2}}, {x, DType::f32, {4}}, {1, 1, 1}, false);
  EXPECT_FALSE(shape.equal);
  EXPECT_EQ(shape.note, "expected F32[4], got F32[2,2]");
  const Comparison type = compare({x, DType::i32, {4}}, {x, DType::f32, {4}}, {1, 1, 1}, false);
  EXPECT_FALSE(type.equal);
  EXPECT_EQ(type.note, "expected F32[4], got I32[4]");
}

TEST(Compare, PartialsAreSummedOverTheFirstAxis) {
  const float partial[6] = {1, 2, 3, 10, 20, 30};
  const float sum[3] = {11, 22, 33};
  EXPECT_TRUE(
      compare({partial, DType::f32, {2, 3}}, {sum, DType::f32, {3}}, {1, 0, 1}, true).equal);
  const float wrong[3] = {11, 22, 34};
  EXPECT_FALSE(
      compare({partial, DType::f32, {2, 3}}, {wrong, DType::f32, {3}}, {1, 0, 1}, true).equal);
  const float zero[3] = {};
  EXPECT_TRUE(
      compare({partial, DType::f32, {0, 3}}, {zero, DType::f32, {3}}, {0, 0, 1}, true).equal)
      << "no partial at all sums to zero";
}

TEST(Compare, CalcDiffIsTheRelativeSquare) {
  const Comparison c = compare_values({1, 2}, {1, 1}, {0, 10, 1});
  EXPECT_DOUBLE_EQ(c.calc_diff, 1.0 / (1 + 1 + 4 + 1));
  EXPECT_EQ(compare_values({0}, {0}, {1, 0, 1}).calc_diff, 0);
}

TEST(DefaultTolerance, FollowsTheDtype) {
  const std::vector<float> values = {1, -8, kInf, kNaN};
  const Tolerance f32 = default_tolerance(view(values));
  EXPECT_EQ(f32.ulp, 4);
  EXPECT_EQ(f32.abs, 8 * 0x1p-22) << "the largest finite element counts";
  EXPECT_EQ(f32.share, 1);
  const uint16_t half[2] = {float_to_bf16(2.0F), float_to_bf16(-4.0F)};
  const Tolerance bf16 = default_tolerance({half, DType::bf16, {2}});
  EXPECT_EQ(bf16.ulp, 1);
  EXPECT_EQ(bf16.abs, 4 * 0x1p-22);
  EXPECT_EQ(bf16.share, 0.01);
  const int32_t integers[1] = {5};
  EXPECT_EQ(default_tolerance({integers, DType::i32, {1}}).abs, 0);
}

// One bf16 rounding step is fine in a hundredth of the elements; truncation is not.
TEST(DefaultTolerance, RejectsTruncation) {
  std::vector<uint16_t> rounded;
  std::vector<uint16_t> truncated;
  for (int i = 0; i < 1000; ++i) {
    const float x = 1.0F + static_cast<float>(i) * 0.000917F;
    rounded.push_back(float_to_bf16(x));
    truncated.push_back(static_cast<uint16_t>(float_bits(x) >> 16));
  }
  const Tensor expected(rounded.data(), DType::bf16, {1000});
  const Tensor got(truncated.data(), DType::bf16, {1000});
  const Comparison c = compare(got, expected, default_tolerance(expected), false);
  EXPECT_FALSE(c.equal);
  EXPECT_EQ(c.failing, 0) << "each is within one unit; only the share tells";
}

TEST(Compare, IntegersSayHowManyDifferAndWhere) {
  const int64_t want[4] = {1, -7, 3, int64_t{1} << 62};
  const int64_t got[4] = {1, 5, 3, (int64_t{1} << 62) + 1};
  const Comparison c = compare({got, DType::i64, {4}}, {want, DType::i64, {4}}, {}, false);
  EXPECT_FALSE(c.equal);
  EXPECT_EQ(c.failing, 2);
  EXPECT_EQ(c.max_error, 12);
  EXPECT_EQ(c.note, "2 of 4 elements, the first at position 1: expected -7, got 5");
  const uint8_t flags[2] = {0, 1};
  const uint8_t other[2] = {0, 0};
  EXPECT_EQ(compare({other, DType::boolean, {2}}, {flags, DType::boolean, {2}}, {}, false).note,
            "1 of 2 elements, the first at position 1: expected 1, got 0");
  const Comparison same = compare({want, DType::i64, {4}}, {want, DType::i64, {4}}, {}, false);
  EXPECT_TRUE(same.equal);
  EXPECT_EQ(same.note, "");
}

// The share of a file's tolerance may be any number.
TEST(Compare, AHugeShareIsAllElements) {
  const float want[2] = {1, 1};
  const float got[2] = {1.5F, 1.5F};
  EXPECT_TRUE(
      compare({got, DType::f32, {2}}, {want, DType::f32, {2}}, {1e9, 0, 1e300}, false).equal);
}

}  // namespace
}  // namespace ehc::cli
