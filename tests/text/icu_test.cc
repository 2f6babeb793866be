// The normaliser against ICU, over every scalar value. ICU 72 knows Unicode 15, our tables 9.0 (and
// 17.0 for lowercase), so they differ; icu_72_differences.txt lists every difference with its
// cause.
#include <gtest/gtest.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>
#include <unicode/uversion.h>

#include <cstdio>
#include <string>
#include <vector>

#include "tests/text/support.h"
#include "text/normalize.h"
#include "text/utf8.h"

namespace ehc::text {
namespace {

bool is_mark(UChar32 c) { return (U_GET_GC_MASK(c) & U_GC_M_MASK) != 0; }

std::string utf8(const icu::UnicodeString& string) {
  std::string out;
  string.toUTF8String(out);
  return out;
}

// The rule, spelled out with ICU.
std::string icu_normalize(const icu::UnicodeString& text) {
  UErrorCode status = U_ZERO_ERROR;
  const icu::UnicodeString composed =
      icu::Normalizer2::getNFKCInstance(status)->normalize(text, status);
  const icu::UnicodeString decomposed =
      icu::Normalizer2::getNFDInstance(status)->normalize(composed, status);
  EXPECT_TRUE(U_SUCCESS(status));
  icu::UnicodeString collapsed;
  for (int32_t i = 0; i < decomposed.length(); i = decomposed.moveIndex32(i, 1)) {
    const UChar32 c = u_tolower(decomposed.char32At(i));
    if (is_mark(decomposed.char32At(i))) continue;
    if (c != ' ' && c != '\t' && c != '\r' && c != '\n') {
      collapsed.append(c);
    } else if (!collapsed.endsWith(icu::UnicodeString(UChar32{' '}))) {
      collapsed.append(UChar32{' '});
    }
  }
  if (utf8(collapsed) == " ") return " ";
  int32_t begin = 0;
  int32_t end = collapsed.length();
  while (begin < end && u_isUWhiteSpace(collapsed.char32At(begin))) ++begin;
  while (end > begin && u_isUWhiteSpace(collapsed.char32At(end - 1))) --end;
  return utf8(collapsed.tempSubStringBetween(begin, end));
}

bool newer_than_9_0(UChar32 c) {
  UVersionInfo age;
  u_charAge(c, age);
  return age[0] > 9;
}

// Why `ours` and ICU's result differ for `c`; "unexplained" fails the comparison with the list.
std::string cause(UChar32 c, const std::string& source, const std::string& ours) {
  UErrorCode status = U_ZERO_ERROR;
  const bool decomposes = !icu::Normalizer2::getNFKDInstance(status)->isNormalized(c, status);
  if (ours == source && newer_than_9_0(c) && is_mark(c)) return "mark newer than Unicode 9.0";
  if (ours == source && newer_than_9_0(c) && decomposes)
    return "decomposition newer than Unicode 9.0";
  if (ours == source && is_mark(c)) return "letter in Unicode 9.0, mark now";
  if (ours.empty() && !is_mark(c)) return "mark in Unicode 9.0, letter now";
  if (u_tolower(c) == c && !is_mark(c)) return "lowercase newer than Unicode 15.0";
  return "unexplained";
}

std::string list_of_differences() {
  struct Range {
    UChar32 first, last;
    std::string cause;
  };
  std::vector<Range> ranges;
  std::string source;
  std::string ours;
  for (UChar32 c = 0; c < 0x110000; ++c) {
    if (U_IS_SURROGATE(c)) continue;
    source.clear();
    append_utf8(static_cast<char32_t>(c), source);
    normalize_into(source, ours);
    if (ours == icu_normalize(icu::UnicodeString(c))) continue;
    const std::string why = cause(c, source, ours);
    if (!ranges.empty() && ranges.back().last == c - 1 && ranges.back().cause == why) {
      ranges.back().last = c;
    } else {
      ranges.push_back({c, c, why});
    }
  }
  std::string list;
  for (const Range& range : ranges) {
    char line[128];
    std::snprintf(line, sizeof(line), "%05X..%05X %s\n", static_cast<unsigned>(range.first),
                  static_cast<unsigned>(range.last), range.cause.c_str());
    list += line;
  }
  return list;
}

TEST(NormalizeAgainstIcu, EveryScalarValue) {
  if (U_ICU_VERSION_MAJOR_NUM != 72) GTEST_SKIP() << "the list is for ICU 72";
  const std::string expected = test::read(EHC_SOURCE_DIR "/tests/text/icu_72_differences.txt");
  EXPECT_EQ(list_of_differences(), expected);
}

// Pairs from scripts that compose, reorder and join, where both know every code point.
TEST(NormalizeAgainstIcu, Pairs) {
  std::vector<UChar32> points = {' ',     '\t',   'a',    'A',    'q',    0x41C,  0x3A3,  0x130,
                                 0xDF,    0xAC00, 0x1100, 0x1161, 0x11A7, 0x11A8, 0x9C7,  0x9BE,
                                 0xFB2A,  0x5D1,  0x1F82, 0x3099, 0x304B, 0xFF76, 0xFF9E, 0x344,
                                 0x1D160, 0x2028, 0xA0,   0x180E, 0x200D};
  for (UChar32 c = 0x300; c < 0x370; ++c) points.push_back(c);
  for (UChar32 c = 0xC0; c < 0x100; ++c) points.push_back(c);
  std::string ours;
  for (const UChar32 first : points) {
    for (const UChar32 second : points) {
      icu::UnicodeString text(first);
      text.append(second);
      normalize_into(utf8(text), ours);
      ASSERT_EQ(ours, icu_normalize(text)) << std::hex << first << ' ' << second;
    }
  }
}

}  // namespace
}  // namespace ehc::text
