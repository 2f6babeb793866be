#include "ehc/mhc/plan_recompute.h"

#include <cmath>

#include "tests/ops/mhc/support.h"

namespace ehc::mhc {
namespace {

using test::Array;
using test::error_of;

struct Plan {
  int64_t length = 0;
  std::vector<int64_t> terms, starts;
};

Plan plan_of(PlanRecompute p) {
  const Array length(DType::i32, {1});
  const Array terms(DType::i64, {2});
  const Array starts(DType::i32, {count_recompute_blocks(p)});
  p.block_length = length;
  p.terms = terms;
  p.block_starts = starts;
  Context context = Context::cpu(1);
  plan_recompute(context, p);
  Plan plan = {
      length.element<int32_t>(0), {terms.element<int64_t>(0), terms.element<int64_t>(1)}, {}};
  for (int64_t i = 0; i < starts.size(); ++i) plan.starts.push_back(starts.element<int32_t>(i));
  return plan;
}

// Starts of the blocks of a length, by walking over the layers.
std::vector<int64_t> starts_of(const std::vector<int64_t>& stages, int64_t length) {
  std::vector<int64_t> starts;
  int64_t layer = 0;
  for (const int64_t layers : stages) {
    for (int64_t in_stage = 0; in_stage < layers; ++in_stage, ++layer) {
      if (in_stage % length == 0) starts.push_back(layer);
    }
  }
  return starts;
}

TEST(PlanRecompute, IsTheSmallestSumOfAllLengths) {
  std::vector<std::vector<int64_t>> all;
  for (int64_t layers = 1; layers <= 70; ++layers) all.push_back({layers});
  all.insert(all.end(), {{5, 5}, {1, 1, 1}, {30, 1}, {7, 11, 13}, {16, 16, 16, 14}, {1, 60}});
  for (const auto& stages : all) {
    int64_t layers = 0;
    for (const int64_t s : stages) layers += s;
    for (int64_t n = 1; n <= 8; ++n) {
      constexpr int64_t kWidth = 7168;
      const Plan got = plan_of({.layers = layers, .n = n, .d = kWidth, .stages = stages});
      int64_t best = 0;
      int64_t least = INT64_MAX;
      for (int64_t length = 1; length <= *std::max_element(stages.begin(), stages.end());
           ++length) {
        const auto blocks = static_cast<int64_t>(starts_of(stages, length).size());
        const int64_t cost = n * kWidth * blocks + (n + 2) * kWidth * length;
        if (cost < least) best = length, least = cost;
      }
      EXPECT_EQ(got.length, best) << layers << " " << n;
      EXPECT_EQ(got.starts, starts_of(stages, best)) << layers << " " << n;
      EXPECT_EQ(got.terms[0], n * kWidth * static_cast<int64_t>(got.starts.size()));
      EXPECT_EQ(got.terms[1], (n + 2) * kWidth * best);
      if (stages.size() > 1) continue;
      // Next to the real optimum, as far as whole blocks allow.
      const double real = std::sqrt(static_cast<double>(n * layers) / static_cast<double>(n + 2));
      EXPECT_LT(std::fabs(static_cast<double>(best) - real), 2.1) << layers << " " << n;
    }
  }
}

TEST(PlanRecompute, WithoutStagesThereIsOne) {
  const int64_t stages[] = {61};
  const Plan one = plan_of({.layers = 61, .n = 4, .d = 5, .stages = stages});
  const Plan none = plan_of({.layers = 61, .n = 4, .d = 5});
  EXPECT_EQ(none.length, one.length);
  EXPECT_EQ(none.starts, one.starts);
  EXPECT_EQ(none.terms, one.terms);
}

TEST(PlanRecompute, TheShorterOfTwoEqualOnes) {
  // n = 1, 6 layers: lengths 1 and 2 both cost 6 + 3 = 3 + 6 = 9.
  EXPECT_EQ(plan_of({.layers = 6, .n = 1, .d = 1}).length, 1);
}

TEST(PlanRecompute, ManyLayersAreSearchedQuickly) {
  constexpr int64_t kMost = 2147483647;
  EXPECT_NEAR(static_cast<double>(count_recompute_blocks({.layers = kMost, .n = 4, .d = 1})),
              std::sqrt(kMost * 1.5), 300);
}

TEST(PlanRecompute, RefusesWhatTheContractForbids) {
  const auto refused = [](const PlanRecompute& p) {
    return error_of([&] { count_recompute_blocks(p); });
  };
  EXPECT_EQ(refused({.n = 4, .d = 8}),
            "mhc.plan_recompute: attribute 'layers': expected a value, got none");
  EXPECT_EQ(refused({.layers = 0, .n = 4, .d = 8}),
            "mhc.plan_recompute: attribute 'layers': expected >= 1, got 0");
  EXPECT_EQ(refused({.layers = 3, .n = 9, .d = 8}),
            "mhc.plan_recompute: attribute 'n': expected in [1,8], got 9");
  EXPECT_EQ(refused({.layers = int64_t{1} << 31, .n = 4, .d = 8}),
            "mhc.plan_recompute: attribute 'layers': expected at most 2147483647, got 2147483648");
  const int64_t stages[] = {2, 2};
  EXPECT_EQ(refused({.layers = 3, .n = 4, .d = 8, .stages = stages}),
            "mhc.plan_recompute: attribute 'stages': expected a sum of 'layers' = 3, got 4");
  const int64_t huge[] = {INT64_MAX, INT64_MAX, 5};
  EXPECT_EQ(refused({.layers = 3, .n = 4, .d = 8, .stages = huge}),
            "mhc.plan_recompute: attribute 'stages': expected a sum of 'layers' = 3, got "
            "9223372036854775807");
  const int64_t zero[] = {0, 3};
  EXPECT_EQ(refused({.layers = 3, .n = 4, .d = 8, .stages = zero}),
            "mhc.plan_recompute: attribute 'stages': expected >= 1, got 0");
  EXPECT_EQ(refused({.layers = 3, .n = 4, .d = INT64_MAX / 4}),
            "mhc.plan_recompute: attribute 'd': expected terms up to 2^63-1, got "
            "2305843009213693951");
}

}  // namespace
}  // namespace ehc::mhc
