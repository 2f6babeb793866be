// The operator engram.token_map on spans; golden files of it run with all other operators.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ehc/text.h"
#include "tests/text/support.h"

namespace ehc::text {
namespace {

struct Tensors {
  std::vector<uint8_t> texts, raw_tokens;
  std::vector<int64_t> text_offsets{0}, raw_offsets{0};
  std::vector<int32_t> table;

  void add(std::string_view text, std::string_view raw) {
    texts.insert(texts.end(), text.begin(), text.end());
    raw_tokens.insert(raw_tokens.end(), raw.begin(), raw.end());
    text_offsets.push_back(static_cast<int64_t>(texts.size()));
    raw_offsets.push_back(static_cast<int64_t>(raw_tokens.size()));
    table.push_back(-7);
  }
  int32_t build() { return build_token_map(texts, text_offsets, raw_tokens, raw_offsets, table); }
};

Tensors three_tokens() {
  Tensors tensors;
  tensors.add("the", "the");
  tensors.add(" The", "_The");
  tensors.add("\u00e9", "\u00e9");
  return tensors;
}

std::string refusal(Tensors tensors) {
  const Error error = test::caught([&] { tensors.build(); });
  EXPECT_EQ(error.kind(), ErrorKind::contract);
  return error.what();
}

TEST(TokenMapOperator, AssignsIdsInOrderOfFirstAppearance) {
  Tensors tensors = three_tokens();
  tensors.add("E", "E");
  tensors.add("THE ", "THE_");
  EXPECT_EQ(tensors.build(), 2);
  EXPECT_EQ(tensors.table, (std::vector<int32_t>{0, 0, 1, 1, 0}));
}

TEST(TokenMapOperator, AllKindsOfKeysShareOneNamespace) {
  Tensors tensors;
  tensors.add("\u00a1", "x");       // normalised
  tensors.add("\ufffd", "\u00a1");  // raw string, equal to the key above
  tensors.add("a\ufffd", "THE");    // a raw string is not normalised
  tensors.add("THE", "y");
  tensors.add("", "z");        // falls back to the empty text
  tensors.add("\u0301", "w");  // falls back to the mark
  tensors.add("\ufffd", "\u0301");
  tensors.add("\u0302", "v");  // other text, other key
  tensors.add("\ufffd", "");
  EXPECT_EQ(tensors.build(), 6);
  EXPECT_EQ(tensors.table, (std::vector<int32_t>{0, 0, 1, 2, 3, 4, 4, 5, 3}));
}

TEST(TokenMapOperator, EmptyVocabularyIsLegal) {
  Tensors tensors;
  EXPECT_EQ(tensors.build(), 0);
}

TEST(TokenMapOperator, RefusesBadOffsets) {
  Tensors tensors = three_tokens();
  tensors.text_offsets[0] = 1;
  EXPECT_EQ(refusal(tensors),
            "engram.token_map: tensor 'text_offsets': expected a first element 0, got 1 at "
            "position 0");

  tensors = three_tokens();
  tensors.raw_offsets[2] = 2;
  EXPECT_EQ(refusal(tensors),
            "engram.token_map: tensor 'raw_offsets': expected elements that do not decrease, got "
            "2 at position 2");

  tensors = three_tokens();
  tensors.text_offsets[1] = INT64_MIN;
  EXPECT_NE(refusal(tensors).find("do not decrease"), std::string::npos);

  tensors = three_tokens();
  tensors.text_offsets[3] = INT64_MAX;
  EXPECT_EQ(refusal(tensors),
            "engram.token_map: tensor 'text_offsets': expected a last element 9, the size of "
            "'texts', got 9223372036854775807 at position 3");

  tensors = three_tokens();
  tensors.raw_tokens.push_back('x');
  EXPECT_NE(refusal(tensors).find("'raw_offsets': expected a last element 10"), std::string::npos);

  tensors = three_tokens();
  tensors.raw_offsets.push_back(9);
  EXPECT_EQ(refusal(tensors),
            "engram.token_map: tensor 'raw_offsets': expected I64[4], got I64[5]");

  tensors = Tensors();
  tensors.text_offsets.clear();
  EXPECT_NE(refusal(tensors).find("expected I64[1], got I64[0]"), std::string::npos);
}

TEST(TokenMapOperator, RefusesWhatIsNotUtf8) {
  Tensors tensors = three_tokens();
  tensors.add("ab\xFF", "ab");
  EXPECT_EQ(refusal(tensors),
            "engram.token_map: tensor 'texts': expected UTF-8, got an invalid sequence at byte 2 "
            "of id 3");

  tensors = three_tokens();
  tensors.add("ab", "\xC3");
  EXPECT_NE(refusal(tensors).find("tensor 'raw_tokens': expected UTF-8"), std::string::npos);

  tensors = three_tokens();
  tensors.text_offsets[3] = 8;  // splits the last character between ids 2 and 3
  tensors.text_offsets.push_back(9);
  tensors.raw_offsets.push_back(9);
  tensors.table.push_back(0);
  EXPECT_NE(refusal(tensors).find("byte 0 of id 2"), std::string::npos);
}

}  // namespace
}  // namespace ehc::text
