// What examples/engram_gate and examples/engram_lookup print.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <regex>
#include <string>

namespace ehc {
namespace {

using testing::HasSubstr;

// Standard output of a program of this build, which must succeed.
std::string output_of(const std::string& program) {
  const std::string path = std::string(EHC_BINARY_DIR) + "/bin/" + program;
  FILE* pipe = popen(("'" + path + "'").c_str(), "r");
  if (pipe == nullptr) return "cannot run " + path;
  std::string text;
  std::array<char, 4096> block{};
  for (size_t got = 0; (got = fread(block.data(), 1, block.size(), pipe)) > 0;) {
    text.append(block.data(), got);
  }
  EXPECT_EQ(pclose(pipe), 0) << path;
  return text;
}

// The number behind `label`.
double number_after(const std::string& text, const std::string& label) {
  const size_t at = text.find(label);
  EXPECT_NE(at, std::string::npos) << label;
  return at == std::string::npos ? NAN : std::stod(text.substr(at + label.size()));
}

int count(const std::string& text, const std::string& pattern) {
  const std::regex expression(pattern);
  return static_cast<int>(
      std::distance(std::sregex_iterator(text.begin(), text.end(), expression), {}));
}

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

}  // namespace
}  // namespace ehc
