#include "text/utf8.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ehc::text {
namespace {

std::string lossy(std::string_view bytes) {
  std::string out;
  append_utf8_lossy(bytes, out);
  return out;
}

TEST(Utf8, EveryScalarValueRoundTrips) {
  for (char32_t c = 0; c < 0x110000; ++c) {
    std::string encoded;
    append_utf8(c, encoded);
    const Utf8Step step = decode_utf8(encoded);
    const bool surrogate = c >= 0xD800 && c < 0xE000;
    ASSERT_EQ(step.valid, !surrogate) << std::hex << static_cast<uint32_t>(c);
    if (surrogate) continue;
    ASSERT_EQ(step.code_point, c);
    ASSERT_EQ(static_cast<size_t>(step.length), encoded.size());
    ASSERT_EQ(find_invalid_utf8(encoded), std::string::npos);
  }
}

TEST(Utf8, FindsTheFirstInvalidByte) {
  EXPECT_EQ(find_invalid_utf8(""), std::string::npos);
  EXPECT_EQ(find_invalid_utf8("ab\xFF"), 2u);
  EXPECT_EQ(find_invalid_utf8("a\xC3\xA9\xC3"), 3u);     // cut off
  EXPECT_EQ(find_invalid_utf8("\xC0\x80"), 0u);          // overlong NUL
  EXPECT_EQ(find_invalid_utf8("\xE0\x9F\xBF"), 0u);      // overlong
  EXPECT_EQ(find_invalid_utf8("\xED\xA0\x80"), 0u);      // surrogate
  EXPECT_EQ(find_invalid_utf8("\xF4\x90\x80\x80"), 0u);  // beyond U+10FFFF
  EXPECT_EQ(find_invalid_utf8("\xF5\x80\x80\x80"), 0u);
}

// One U+FFFD per maximal subpart, as in the examples of the Unicode standard, section 3.9.
TEST(Utf8, LossyReplacesMaximalSubparts) {
  const std::string r(kReplacementCharacter);
  EXPECT_EQ(lossy("plain \xC3\xA9"), "plain \xC3\xA9");
  EXPECT_EQ(lossy("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"), r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(lossy("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41"), r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(lossy("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42"), r + r + r + r + r + "A" + r + r + "B");
  EXPECT_EQ(lossy("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), r + r + r + r + "A");
  EXPECT_EQ(lossy("\xF0\x9F\x98"), r);
}

}  // namespace
}  // namespace ehc::text
