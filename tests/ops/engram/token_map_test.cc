#include "ehc/engram/token_map.h"

#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::context_for;
using test::error_of;
using test::implementations;

// A vocabulary from pairs {text, raw token}.
struct Vocabulary {
  std::string texts;
  std::string raw_tokens;
  std::vector<int64_t> text_offsets = {0};
  std::vector<int64_t> raw_offsets = {0};

  explicit Vocabulary(const std::vector<std::pair<std::string, std::string>>& tokens) {
    for (const auto& [text, raw] : tokens) {
      texts += text;
      raw_tokens += raw;
      text_offsets.push_back(static_cast<int64_t>(texts.size()));
      raw_offsets.push_back(static_cast<int64_t>(raw_tokens.size()));
    }
  }
  [[nodiscard]] TokenMap params(std::vector<int32_t>& table, int32_t& size) const {
    const auto count = static_cast<int64_t>(text_offsets.size()) - 1;
    table.assign(static_cast<size_t>(count), -7);
    return {
        .texts = {texts.data(), DType::u8, {static_cast<int64_t>(texts.size())}},
        .text_offsets = {text_offsets.data(), DType::i64, {count + 1}},
        .raw_tokens = {raw_tokens.data(), DType::u8, {static_cast<int64_t>(raw_tokens.size())}},
        .raw_offsets = {raw_offsets.data(), DType::i64, {static_cast<int64_t>(raw_offsets.size())}},
        .table = {table.data(), DType::i32, {count}},
        .size = {&size, DType::i32, {1}}};
  }
};

TEST(TokenMap, EqualKeysShareAnId) {
  const Vocabulary vocabulary({{"The", "The"},
                               {" the", "\xC4\xA0the"},
                               {" ", "\xC4\xA0"},
                               {"\n\t ", "x"},
                               {"\xEF\xBF\xBD", "the"},  // U+FFFD: the raw string is the key
                               {"\xCC\x81", "mark"},     // a mark alone: nothing is left of it
                               {"", "empty"}});
  for (const std::string& impl : implementations("engram.token_map")) {
    std::vector<int32_t> table;
    int32_t size = -1;
    Context context = context_for(impl);
    token_map(context, vocabulary.params(table, size));
    EXPECT_EQ(table, (std::vector<int32_t>{0, 0, 1, 1, 0, 2, 3})) << impl;
    EXPECT_EQ(size, 4) << impl;
  }
}

TEST(TokenMap, RefusesBadVocabularies) {
  Context context = Context::cpu(1);
  std::vector<int32_t> table;
  int32_t size = -1;
  const auto refusal = [&](const Vocabulary& vocabulary) {
    const std::string text = error_of([&] { token_map(context, vocabulary.params(table, size)); });
    for (const int32_t id : table) EXPECT_EQ(id, -7);
    EXPECT_EQ(size, -1);
    return text;
  };
  const std::vector<std::pair<std::string, std::string>> tokens = {{"a", "b"}, {"c", "d"}};
  Vocabulary v(tokens);
  v.text_offsets = {1, 1, 2};
  EXPECT_EQ(refusal(v),
            "engram.token_map: tensor 'text_offsets': expected a first element 0, got 1 at "
            "position 0");
  v.text_offsets = {0, 5, 2};
  EXPECT_EQ(refusal(v),
            "engram.token_map: tensor 'text_offsets': expected elements that do not decrease, got "
            "2 at position 2");
  v.text_offsets = {0, 1, 3};
  EXPECT_EQ(refusal(v),
            "engram.token_map: tensor 'text_offsets': expected a last element 2, the size of "
            "'texts', got 3 at position 2");
  v = Vocabulary(tokens);
  v.raw_offsets = {0, 2};
  EXPECT_EQ(refusal(v), "engram.token_map: tensor 'raw_offsets': expected I64[3], got I64[2]");
  v = Vocabulary({{"a", "b"}, {"c", "\xC3"}});
  EXPECT_EQ(refusal(v),
            "engram.token_map: tensor 'raw_tokens': expected UTF-8, got an invalid sequence at "
            "byte 0 of id 1");
}

}  // namespace
}  // namespace ehc::engram
