#include "text/normalize.h"

#include <gtest/gtest.h>

#include "ehc/text.h"
#include "tests/text/support.h"
#include "text/utf8.h"

namespace ehc::text {
namespace {

TEST(Normalize, Lowercase) {
  EXPECT_EQ(normalize("THE"), "the");
  EXPECT_EQ(normalize("STRASSE"), "strasse");
  EXPECT_EQ(normalize("stra\u00dfe"), "stra\u00dfe");    // not case folding
  EXPECT_EQ(normalize("\u0391\u03a3"), "\u03b1\u03c3");  // capital sigma at the end of a word
  EXPECT_EQ(normalize("\u03b1\u03c2"), "\u03b1\u03c2");  // final sigma stays
  EXPECT_EQ(normalize("\u0130"), "i");  // its dot is a mark and falls before lowercase
  EXPECT_EQ(normalize("\U00010400"), "\U00010428");
}

TEST(Normalize, DecompositionAndMarks) {
  EXPECT_EQ(normalize("\u00e9"), "e");
  EXPECT_EQ(normalize("e\u0301\u0302"), "e");
  EXPECT_EQ(normalize("\u212b"), "a");  // angstrom sign
  EXPECT_EQ(normalize("\u304c"), "\u304b");
  EXPECT_EQ(normalize("\u094d\u092f"), "\u092f");  // Mn and Mc marks
  EXPECT_EQ(normalize("a\u20dd"), "a");            // Me
  EXPECT_EQ(normalize("\U000e0101x"), "x");
  EXPECT_EQ(normalize("\u0301"), "");
}

TEST(Normalize, CompatibilityForms) {
  EXPECT_EQ(normalize("\uff21\uff0c"), "a,");
  EXPECT_EQ(normalize("\ufb01"), "fi");
  EXPECT_EQ(normalize("\u2460\u00b2"), "12");
  EXPECT_EQ(normalize("\u00bd"), "1\u20442");
  EXPECT_EQ(normalize("\u01c5"), "dz");
  EXPECT_EQ(normalize("\u2116"), "no");
  EXPECT_EQ(normalize("\u2026"), "...");
}

TEST(Normalize, Hangul) {
  EXPECT_EQ(normalize("\ud55c\uad6d"), "\u1112\u1161\u11ab\u1100\u116e\u11a8");
  EXPECT_EQ(normalize("\uac00"), "\u1100\u1161");
  EXPECT_EQ(normalize("\ud7a3"), "\u1112\u1175\u11c2");
  EXPECT_EQ(normalize("\u1100\u1161\u11a7"), "\u1100\u1161\u11a7");
  EXPECT_EQ(normalize("\ud7a4"), "\ud7a4");  // one past the last syllable
}

TEST(Normalize, WhiteSpace) {
  EXPECT_EQ(normalize(" a \t\r\n b "), "a b");
  EXPECT_EQ(normalize(" "), " ");
  EXPECT_EQ(normalize("\r\n\t  "), " ");
  EXPECT_EQ(normalize("\u00a0"), " ");  // NFKC makes it a space, which then stands alone
  EXPECT_EQ(normalize("\u3000\u2003"), " ");
  EXPECT_EQ(normalize("\v"), "");  // white space, but neither collapsed nor spared
  EXPECT_EQ(normalize(" \v"), "");
  EXPECT_EQ(normalize("a\v b"), "a\v b");
  EXPECT_EQ(normalize("\u2028a\u0085\u1680"), "a");
  EXPECT_EQ(normalize(" \u0301"), " ");
  EXPECT_EQ(normalize("\u200bx\u200b"), "\u200bx\u200b");  // zero width space is no white space
  EXPECT_EQ(normalize("\x1c x"), "\x1c x");                // nor is the file separator
}

TEST(Normalize, KeepsEverythingElse) {
  EXPECT_EQ(normalize(""), "");
  EXPECT_EQ(normalize(std::string_view("a\0b", 3)), std::string_view("a\0b", 3));
  EXPECT_EQ(normalize("\u4f60\u597d"), "\u4f60\u597d");
  EXPECT_EQ(normalize("\ue000\U0010ffff\ufffd"), "\ue000\U0010ffff\ufffd");
}

TEST(Normalize, UnicodeVersion) {
  EXPECT_EQ(unicode_table_version(), "unicode-9.0-lower-17.0");
  EXPECT_EQ(normalize("\u08d4"), "");        // mark of 9.0
  EXPECT_EQ(normalize("\u08d3"), "\u08d3");  // mark of 11.0
  EXPECT_EQ(normalize("\u1cf2"), "");        // mark until 11.0
  EXPECT_EQ(normalize("\u32ff"), "\u32ff");  // square era name of 12.1, not decomposed
  EXPECT_EQ(normalize("\ua7ce"), "\ua7cf");  // lowercase of 17.0
}

TEST(Normalize, IsIdempotentOnEveryScalarValue) {
  std::string source;
  std::string once;
  std::string twice;
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    source.clear();
    append_utf8(c, source);
    normalize_into(source, once);
    normalize_into(once, twice);
    ASSERT_EQ(once, twice) << "U+" << std::hex << static_cast<uint32_t>(c);
  }
}

TEST(Normalize, RefusesWhatIsNotUtf8) {
  const Error error = test::caught([] { normalize("ab\xC3"); });
  EXPECT_EQ(error.kind(), ErrorKind::contract);
  EXPECT_STREQ(error.what(),
               "normalize: 'text': expected UTF-8, got an invalid sequence at byte 2");
}

}  // namespace
}  // namespace ehc::text
