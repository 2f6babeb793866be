// What the Engram programs of examples/ print.
#include "tests/examples/support.h"

namespace ehc::test {
namespace {

using testing::HasSubstr;

TEST(Examples, EngramGatePrintsShapesIdentityAndBytes) {
  const std::string text = output_of("engram_gate");
  for (const char* line :
       {"hidden_states (5, 4, 256) bf16\n", "kv (5, 5, 256) bf16\n", "key (5, 4, 256) bf16\n",
        "value (5, 256) bf16\n", "weight_hidden (4, 256) bf16\n", "weight_embed (4, 256) bf16\n",
        "weight_fused (4, 256) fp32\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
  EXPECT_LE(number_after(text, "max |gate_naive - gate_fused| = "), 0x1p-22);
  EXPECT_LE(number_after(text, "max |dot_naive - dot_fused| = "), 2e-6);
  constexpr double kTokens = 5;
  constexpr double kStreams = 4;
  constexpr double kWidth = 256;
  const double row = kTokens * kWidth;
  EXPECT_EQ(number_after(text, "normed_x + normed_k: "), 2 * kStreams * row * 4);
  EXPECT_EQ(number_after(text, "read x + kv "), (2 * kStreams + 1) * row * 2);
  EXPECT_EQ(number_after(text, "write "), kStreams * row * 2);
  EXPECT_EQ(number_after(text, "B, weight_fused "), kStreams * kWidth * 4);
  EXPECT_EQ(number_after(text, "saved statistics at T = 8192: "), 512);
}

TEST(Examples, EngramLookupReadsSixteenRowsWhateverTheTable) {
  const std::string text = output_of("engram_lookup");
  EXPECT_THAT(text, HasSubstr("table of 258000 slots\n"));
  EXPECT_THAT(text, HasSubstr("table of 10000000 slots\n"));
  for (const char* line : {"ngram_token_ids \\(6, 3\\) int32\n", "multipliers \\(2, 3\\) int64\n",
                           "vocab_sizes \\(2, 2, 8\\) int32\n", "offsets \\(2, 16\\) int32\n",
                           "indices \\(2, 6, 16\\) int32\n", "rows gathered per token: 16 to 16\n",
                           "second run identical: yes\n"}) {
    EXPECT_EQ(count(text, line), 2) << line << text;
  }
}

TEST(Examples, EngramSinkhornPrintsTheKnownIterations) {
  const std::string text = output_of("engram_sinkhorn");
  const auto update = lists_after(text, "update");
  ASSERT_EQ(update.size(), 3);
  expect_printed(update[0], {0.661352, 0.266924, 0.061677, 0.621317}, 1e-6);
  expect_printed(update[1], {-0.451906, -0.166130, -1.522768, 0.381684}, 1e-6);
  expect_printed(update[2], {-1.027609, -0.563053, -0.892291, -0.058250}, 1e-6);

  const auto columns = lists_after(text, "col L2 before col step");
  ASSERT_EQ(columns.size(), 8);
  expect_printed(columns[0], {1.02401, 0.48524, 1.10937, 0.6966}, 1e-5);
  expect_printed(columns[1], {0.82921, 0.83304, 0.98586, 0.80408}, 1e-5);
  expect_printed(columns[2], {0.85121, 0.85212, 0.91841, 0.84014}, 1e-5);
  expect_printed(columns[3], {0.86009, 0.85998, 0.88699, 0.8567}, 1e-5);
  expect_printed(columns[4], {0.86367, 0.86346, 0.87408, 0.86284}, 1e-5);
  expect_printed(columns[7], {0.86589, 0.86586, 0.86646, 0.8659}, 1e-5);
  // One or two roundings of a norm close to 1; which, depends on the order of the sums.
  EXPECT_EQ(count(text, "max \\|row L2 - 1\\| = "), 8);
  EXPECT_LE(number_after(text, "step 0: max |row L2 - 1| = "), 0x1p-22);
  EXPECT_LE(number_after(text, "step 7: max |row L2 - 1| = "), 0x1p-22);

  const auto before = lists_after(text, "row L2 before finalize");
  const auto after = lists_after(text, "row L2 after finalize");
  ASSERT_EQ(before.size(), 1);
  ASSERT_EQ(after.size(), 1);
  expect_printed(before[0], {1.15488, 1.15442, 1.1548}, 1e-5);
  expect_printed(after[0], {2, 2, 2}, 1e-5);
  const auto result = lists_after(text, "result");
  ASSERT_EQ(result.size(), 3);
  expect_printed(result[0], {1.022537, 0.866552, 0.065289, 1.482984}, 1e-6);
  expect_printed(result[1], {-0.681269, -0.525871, -1.571715, 0.888282}, 1e-6);
  expect_printed(result[2], {-1.220624, -1.404312, -0.725655, -0.106814}, 1e-6);
}

}  // namespace
}  // namespace ehc::test
