// What the mHC programs of examples/ print.
#include "tests/examples/support.h"

namespace ehc::test {
namespace {

using testing::HasSubstr;

// A sum of four fp32 numbers close to 1/4 is off by a few units of its last place.
constexpr double kSumRounding = 2.5e-7;

TEST(Examples, MhcSinkhornPrintsTheKnownCurve) {
  const std::string text = output_of("mhc_sinkhorn");
  const auto normal = lists_after(text, "normal");
  ASSERT_EQ(normal.size(), 4);
  expect_printed(normal[0], {-1.1258398, -1.1523602, -0.2505786, -0.4338788}, 1e-7);
  expect_printed(normal[1], {0.8487103, 0.6920093, -0.3160128, -2.1152196}, 1e-7);
  expect_printed(normal[2], {0.322275, -1.2633348, 0.3499832, 0.3081339}, 1e-7);
  expect_printed(normal[3], {0.1198415, 1.2376579, 1.1167772, -0.2472777}, 1e-7);
  const auto map = lists_after(text, "map");
  ASSERT_EQ(map.size(), 4);
  expect_printed(map[0], {0.078159, 0.0687967, 0.3554636, 0.4975992}, 3e-7);
  expect_printed(map[1], {0.5682985, 0.38556, 0.0437015, 0.0024172}, 3e-7);
  expect_printed(map[2], {0.2919925, 0.0113706, 0.2437905, 0.4528599}, 3e-7);
  expect_printed(map[3], {0.0615492, 0.5342717, 0.3570434, 0.0471227}, 3e-7);

  const auto row_deviation = [&](int repeat) {
    return number_after(text, "repeat " + std::to_string(repeat) + ": max |row_sum - 1| = ");
  };
  struct Point {
    int repeat;
    double deviation;
    double unit;  // of the last printed digit
  };
  for (const Point& p :
       {Point{1, 5.337e-1, 1e-4}, Point{2, 2.569e-1, 1e-4}, Point{3, 1.539e-1, 1e-4},
        Point{5, 5.911e-2, 1e-5}, Point{10, 5.696e-3, 1e-6}, Point{20, 5.376e-5, 1e-8},
        Point{30, 1.371e-6, 1e-9}, Point{50, 1.01e-6, 1e-8}}) {
    EXPECT_NEAR(row_deviation(p.repeat), p.deviation, p.unit + kSumRounding) << p.repeat;
  }
  // The floor that eps leaves, from the first round on.
  size_t at = 0;
  int rounds = 0;
  for (; (at = text.find("max |col_sum - 1| = ", at)) != std::string::npos; ++rounds) {
    const double deviation = number_after(text.substr(at), "max |col_sum - 1| = ");
    EXPECT_GT(deviation, 5e-7);
    EXPECT_LT(deviation, 2.2e-6);
    at += 1;
  }
  EXPECT_EQ(rounds, 8);
}

TEST(Examples, MhcMixFlowPrintsShapesSumsAndTheRecursion) {
  const std::string text = output_of("mhc_mix_flow");
  for (const char* line : {"pre (3, 4, 1) fp32\n", "post (3, 4, 1) fp32\n", "comb (3, 4, 4) fp32\n",
                           "layer_input (3, 64) bf16\n", "new residual (3, 4, 64) bf16\n",
                           "new residual is the formula, bit for bit: yes\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
  for (const char* label : {"comb row sums", "comb column sums"}) {
    const auto sums = lists_after(text, label);
    ASSERT_EQ(sums.size(), 1) << label;
    EXPECT_EQ(sums[0].size(), 12) << label;
    for (const double sum : sums[0]) {
      EXPECT_GE(sum, 1 - 2e-6) << label;
      EXPECT_LE(sum, 1) << label;
    }
  }
}

// Bytes in bf16 of the streams, rows and coefficients that the comments name; n = 4, d = 128.
TEST(Examples, MhcStackKeepsTheBytesOfItsPlanAndTheGradients) {
  constexpr int64_t kTokens = 256, kStreams = 4 * 128 * 2, kRow = 128 * 2;
  constexpr int64_t kCoefficients = 4 * (4 + 4 + 16);       // pre, post, comb
  constexpr int64_t kRestOfState = 4 * (24 + 24 + 1 + 16);  // mixes, mul, sqr, comb_logits
  const std::string text = output_of("mhc_stack");
  const std::regex line(R"((deepseek-\S+) +(\d+) +(\d+) +(\S+) +(\S+) +(\S+) +(\S+) +(\w+)\n)");
  int lines = 0;
  for (std::sregex_iterator at(text.begin(), text.end(), line), none; at != none; ++at, ++lines) {
    const std::smatch& column = *at;
    const int64_t sublayers = std::stoll(column[2]);
    const int64_t length = std::stoll(column[3]);
    // Engram layers stand before sublayers 2 and 28.
    const int64_t engrams = sublayers > 28 ? 2 : 1;
    int64_t blocks = 0;
    for (const int64_t stage : engrams == 2 ? std::vector<int64_t>{2, 26, sublayers - 28}
                                            : std::vector<int64_t>{2, sublayers - 2}) {
      blocks += (stage + length - 1) / length;
    }
    const int64_t all = (sublayers + 1 + engrams) * kStreams + 2 * sublayers * kRow +
                        sublayers * (kCoefficients + kRestOfState);
    const int64_t some = blocks * kStreams + sublayers * (kRow + kCoefficients);
    EXPECT_NEAR(std::stod(column[4]), static_cast<double>(kTokens * all) / 1024, 0.06) << column[0];
    EXPECT_NEAR(std::stod(column[5]), static_cast<double>(kTokens * some) / 1024, 0.06)
        << column[0];
    EXPECT_LT(std::stod(column[7]), std::stod(column[6])) << column[0];
    EXPECT_EQ(column[8], "yes") << column[0];
  }
  EXPECT_EQ(lines, 6);
}

}  // namespace
}  // namespace ehc::test
