// The figures of `ehc gain`.
#include "cli/gain.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ehc/mhc/amax_gain.h"

namespace ehc::cli {
namespace {

TEST(Gain, OfPermutationsIsOne) {
  // Two tokens of three layers, each a permutation of three streams.
  constexpr int kOrders[6][3] = {{0, 1, 2}, {2, 0, 1}, {1, 0, 2}, {2, 1, 0}, {1, 2, 0}, {0, 2, 1}};
  Context context = Context::cpu(1);
  const HostTensor comb(context, DType::f32, {3, 2, 3, 3});
  std::fill_n(comb.tensor.as<float>(), comb.tensor.numel(), 0.0F);
  for (int map = 0; map < 6; ++map) {
    for (int i = 0; i < 3; ++i) comb.tensor.as<float>()[map * 9 + i * 3 + kOrders[map][i]] = 1;
  }
  for (const GainRow& row : gains_of(context, comb.tensor)) {
    EXPECT_EQ(row.forward, 1);
    EXPECT_EQ(row.backward, 1);
    EXPECT_EQ(row.composite_forward, 1);
    EXPECT_EQ(row.composite_backward, 1);
    EXPECT_EQ(row.row_defect, 0);
    EXPECT_EQ(row.column_defect, 0);
    EXPECT_EQ(row.spectral_bound, 1);
  }
}

TEST(Gain, IsTheWorstTokensLayerByLayer) {
  // Token 0 is the unit matrix throughout. Token 1: [[1, 2], [0, 1]], then [[1, 0], [-3, 1]], whose
  // product is [[-5, 2], [-3, 1]].
  const float maps[] = {1, 0, 0, 1, 1, 2, 0, 1, 1, 0, 0, 1, 1, 0, -3, 1};
  Context context = Context::cpu(1);
  const std::vector<GainRow> rows = gains_of(context, Tensor(maps, DType::f32, {2, 2, 2, 2}));
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0].forward, 3) << "column sums";
  EXPECT_EQ(rows[0].backward, 3) << "row sums";
  EXPECT_EQ(rows[0].composite_forward, 3);
  EXPECT_EQ(rows[0].row_defect, 2);
  EXPECT_EQ(rows[0].column_defect, 2);
  EXPECT_EQ(rows[0].spectral_bound, 3);
  EXPECT_EQ(rows[1].forward, 4);
  EXPECT_EQ(rows[1].backward, 4);
  EXPECT_EQ(rows[1].composite_forward, 8);
  EXPECT_EQ(rows[1].composite_backward, 7);
  EXPECT_EQ(rows[1].row_defect, 3);
  EXPECT_EQ(rows[1].spectral_bound, 4);
}

TEST(Gain, OfAProductIsThatOfTheOperatorAtEveryDepth) {
  Context context = Context::cpu(2);
  const HostTensor maps = random_logits(context, 9, 1, 4, 1, 7);
  const std::vector<GainRow> rows = gains_of(context, maps.tensor);
  for (int64_t l = 0; l < 9; ++l) {
    const HostTensor alone(context, DType::f32, {2, l + 1, 1});
    const HostTensor composite(context, DType::f32, {2, 1});
    mhc::amax_gain(context, {.comb = maps.tensor.slice(0, 0, l + 1),
                             .forward_gain = alone.tensor.select(0, 0),
                             .backward_gain = alone.tensor.select(0, 1),
                             .composite_forward_gain = composite.tensor.select(0, 0),
                             .composite_backward_gain = composite.tensor.select(0, 1)});
    EXPECT_EQ(rows[static_cast<size_t>(l)].composite_forward, composite.tensor.as<float>()[0]) << l;
    EXPECT_EQ(rows[static_cast<size_t>(l)].composite_backward, composite.tensor.as<float>()[1])
        << l;
  }
}

TEST(Gain, ANanIsSeen) {
  float maps[] = {1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1};
  maps[4] = std::numeric_limits<float>::quiet_NaN();
  Context context = Context::cpu(1);
  const std::vector<GainRow> rows = gains_of(context, Tensor(maps, DType::f32, {1, 3, 2, 2}));
  EXPECT_TRUE(std::isnan(rows[0].forward));
  EXPECT_TRUE(std::isnan(rows[0].composite_backward));
}

TEST(Gain, StaysAtOneUnderTheConstraintAlone) {
  Context context = Context::cpu(2);
  const HostTensor logits = random_logits(context, 60, 40, 4, 1, 3);
  const HostTensor maps =
      constrained_maps(context, logits.tensor, 20, 1e-6, mhc::SinkhornConvention::deepseek);
  const GainRow bound = gains_of(context, maps.tensor).back();
  EXPECT_NEAR(bound.composite_forward, 1, 1e-3);
  EXPECT_NEAR(bound.composite_backward, 1, 1e-3);
  EXPECT_LT(bound.column_defect, 3e-6);
  EXPECT_LT(bound.row_defect, 1e-2);
  EXPECT_GT(gains_of(context, logits.tensor).back().composite_forward, 1e6);
  const HostTensor other = random_logits(context, 60, 40, 4, 1, 4);
  EXPECT_NE(logits.tensor.as<float>()[0], other.tensor.as<float>()[0]);
}

}  // namespace
}  // namespace ehc::cli
