#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "ehc/text.h"
#include "tests/text/support.h"

namespace ehc::text {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

const std::string kByteLevel = R"("decoder": {"type": "ByteLevel"})";

std::string tokenizer(const std::string& vocab, const std::string& added = "[]",
                      const std::string& decoder = kByteLevel) {
  return R"({"version": "1.0", "added_tokens": )" + added + R"(, )" + decoder +
         R"(, "model": {"type": "BPE", "vocab": )" + vocab + R"(, "merges": [["a", "b"], "c d"]}})";
}

Vocabulary vocabulary_of(const std::string& json) {
  const test::ScratchFolder folder;
  return read_tokenizer_json(folder.write("tokenizer.json", json));
}

// The text of the error without the file's path.
std::string refusal(const std::string& json) {
  const test::ScratchFolder folder;
  const std::string path = folder.write("tokenizer.json", json);
  const Error error = test::caught([&] { read_tokenizer_json(path); });
  EXPECT_EQ(error.kind(), ErrorKind::io);
  EXPECT_THAT(error.what(), StartsWith(path + ": "));
  return std::string(error.what()).substr(path.size() + 2);
}

TEST(TokenizerJson, DecodesByteCharacters) {
  const Vocabulary vocabulary = vocabulary_of(tokenizer(
      R"({"\u0120The": 1, "!": 0, "\u00c3\u00a9": 2, "\u00c3": 3, "\u010a": 4, "\u0100": 5,
                    "\u0143": 6, "\u00a1\u00c3\u00a9": 7})"));
  ASSERT_EQ(vocabulary.size(), 8);
  EXPECT_EQ(vocabulary.text(0), "!");
  EXPECT_EQ(vocabulary.text(1), " The");
  EXPECT_EQ(vocabulary.raw_token(1), "\u0120The");
  EXPECT_EQ(vocabulary.text(2), "\u00e9");
  EXPECT_EQ(vocabulary.text(3), "\ufffd");
  EXPECT_EQ(vocabulary.text(4), "\n");
  EXPECT_EQ(vocabulary.text(5), std::string_view("\0", 1));
  EXPECT_EQ(vocabulary.text(6), "\ufffd");  // byte AD, the last of the 256 characters
  EXPECT_EQ(vocabulary.text(7), "\ufffd\u00e9");
}

// One character outside the 256 makes the whole token its own text; added tokens are no exception.
TEST(TokenizerJson, DecodesAddedTokensByTheSameRule) {
  const Vocabulary vocabulary = vocabulary_of(tokenizer(
      R"({"a": 0, "<s>": 1})",
      R"([{"id": 1, "content": "<s>", "special": true}, {"content": "<\uff5c \u0120>", "id": 2},
          {"id": 3, "content": "\u00e9"}, {"id": 4, "content": "\u0144"}, {"id": 5, "content": ""}])"));
  ASSERT_EQ(vocabulary.size(), 6);
  EXPECT_EQ(vocabulary.text(1), "<s>");
  EXPECT_EQ(vocabulary.text(2), "<\uff5c \u0120>");
  EXPECT_EQ(vocabulary.text(3), "\ufffd");
  EXPECT_EQ(vocabulary.raw_token(3), "\u00e9");
  EXPECT_EQ(vocabulary.text(4), "\u0144");  // one past the 256 characters
  EXPECT_EQ(vocabulary.text(5), "");
}

TEST(TokenizerJson, AcceptsOtherSpellings) {
  EXPECT_EQ(vocabulary_of(tokenizer("{}")).size(), 0);
  EXPECT_EQ(vocabulary_of(tokenizer(R"({"a": 0})", "[]",
                                    R"("decoder": {"decoders": [{"type": "ByteLevel"}],
                                                   "type": "Sequence"})"))
                .size(),
            1);
  EXPECT_EQ(vocabulary_of(R"({"decoder": {"type": "ByteLevel"},
                              "model": {"merges": [], "vocab": {"a": 0}}})")
                .size(),
            1);
  // Sections of the same names elsewhere are not ours.
  EXPECT_EQ(vocabulary_of(tokenizer(R"({"a": 0})", "[]",
                                    kByteLevel + R"(, "x": {"model": 1, "vocab": {"q": -1},
                                    "decoder": [], "added_tokens": [[{"id": 0.5}], null]})"))
                .size(),
            1);
}

TEST(TokenizerJson, RefusesOtherTokenizers) {
  EXPECT_EQ(refusal(R"({"decoder": {"type": "WordPiece"},
                        "model": {"type": "WordPiece", "vocab": {"a": 0}}})"),
            "expected a BPE model, got 'WordPiece'");
  EXPECT_EQ(refusal(R"({"decoder": {"type": "ByteLevel"}, "model": {"vocab": {"a": 0}}})"),
            "expected a BPE model, got ''");
  EXPECT_EQ(refusal(R"({"decoder": {"type": "ByteLevel"},
                        "model": {"type": "Unigram", "vocab": [["a", 0.0]]}})"),
            "key 'vocab': expected an object, got an array");
  EXPECT_EQ(refusal(tokenizer(R"({"a": 0})", "[]", R"("decoder": null)")),
            "expected the decoder to be ByteLevel, got none");
  EXPECT_EQ(refusal(tokenizer(R"({"a": 0})", "[]",
                              R"("decoder": {"type": "Sequence", "decoders": [
                                 {"type": "Replace", "pattern": {"String": "x"}},
                                 {"type": "ByteFallback"}, {"type": "ByteLevel"}]})")),
            "expected the decoder to be ByteLevel, got Replace, ByteFallback, ByteLevel");
  EXPECT_EQ(refusal("{}"), "expected 'model' with a 'vocab'");
  EXPECT_EQ(refusal("[]"), "the document: expected an object, got an array");
  EXPECT_EQ(refusal("3"), "the document: expected an object, got a number");
  EXPECT_EQ(refusal(R"({"model": 3})"), "key 'model': expected an object, got a number");
  EXPECT_EQ(refusal(R"({"added_tokens": null})"),
            "key 'added_tokens': expected an array, got null");
}

TEST(TokenizerJson, RefusesBadIds) {
  EXPECT_EQ(refusal(tokenizer(R"({"a": 0, "b": -1})")),
            "token 'b': expected an id from 0 to 2147483647, got a negative number");
  EXPECT_EQ(refusal(tokenizer(R"({"a": 4294967296})")),
            "token 'a': expected an id from 0 to 2147483647, got a number that is too large");
  EXPECT_THAT(refusal(tokenizer(R"({"a": 99999999999999999999999})")),
              HasSubstr("got a number that is not an integer"));
  EXPECT_THAT(refusal(tokenizer(R"({"a": 1e999})")), StartsWith("not valid JSON at byte "));
  EXPECT_THAT(refusal(tokenizer(R"({"a": 1.0})")), HasSubstr("not an integer"));
  EXPECT_THAT(refusal(tokenizer(R"({"a": "0"})")), HasSubstr("got a string"));
  EXPECT_THAT(refusal(tokenizer(R"({"a": null})")), HasSubstr("got null"));
  EXPECT_THAT(refusal(tokenizer(R"({"a": {"b": 1}})")), HasSubstr("got an object"));
  EXPECT_EQ(refusal(tokenizer(R"({"a": 0, "b": 0})")), "tokens 'a' and 'b' have the same id 0");
  EXPECT_EQ(refusal(tokenizer(R"({"a": 0, "b": 2})")),
            "token 'b': expected the 2 tokens to have the ids 0 to 1 without a hole, got id 2");
  EXPECT_THAT(refusal(tokenizer(R"({"a": 0, "b": 2147483647})")),
              HasSubstr("without a hole, got id 2147483647"));
  EXPECT_EQ(refusal(tokenizer(R"({"a": 0, "a": 1})")), "token 'a' appears twice");
}

TEST(TokenizerJson, RefusesBadAddedTokens) {
  const std::string vocab = R"({"a": 0, "b": 1})";
  EXPECT_EQ(refusal(tokenizer(vocab, R"([{"id": 1, "content": "a"}])")),
            "token 'a' has two ids, 0 and 1");
  EXPECT_EQ(refusal(tokenizer(vocab, R"([{"id": 1, "content": "c"}])")),
            "tokens 'b' and 'c' have the same id 1");
  EXPECT_EQ(refusal(tokenizer(vocab, R"([{"id": 3, "content": "c"}])")),
            "token 'c': expected the 3 tokens to have the ids 0 to 2 without a hole, got id 3");
  EXPECT_EQ(refusal(tokenizer(vocab, R"([{"id": 2, "content": "c"}, {"id": 3}])")),
            "added token number 1: expected 'id' and 'content'");
  EXPECT_EQ(refusal(tokenizer(vocab, R"([{"content": "c"}])")),
            "added token number 0: expected 'id' and 'content'");
  EXPECT_EQ(refusal(tokenizer(vocab, R"([{"content": 7, "id": 2}])")),
            "added token number 0: expected a string, got a number");
  EXPECT_EQ(refusal(tokenizer(vocab, R"(["c"])")),
            "added token number 0: expected an object, got a string");
}

TEST(TokenizerJson, RefusesSectionsThatAppearTwice) {
  EXPECT_EQ(refusal(R"({"model": {"type": "BPE", "vocab": {"a": 0}, "vocab": {"b": 0}}})"),
            "key 'vocab' appears twice");
  EXPECT_EQ(refusal(R"({"decoder": {"type": "ByteLevel"}, "decoder": null})"),
            "key 'decoder' appears twice");
}

TEST(TokenizerJson, RefusesDamagedFiles) {
  const std::string whole =
      tokenizer(R"({"a": 0, "\u0120b": 1})", R"([{"id": 2, "content": "c"}])");
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_THAT(refusal(whole.substr(0, length)), StartsWith("not valid JSON at byte ")) << length;
  }
  EXPECT_THAT(refusal(whole + "x"), StartsWith("not valid JSON at byte "));
  EXPECT_THAT(refusal(tokenizer("{\"a\xFF\": 0}")), HasSubstr("ill-formed UTF-8 byte"));
  EXPECT_THAT(refusal(tokenizer("{\"a\xED\xA0\x80\": 0}")), HasSubstr("ill-formed UTF-8 byte"));
  EXPECT_THAT(refusal(tokenizer(R"({"\ud800": 0})")), StartsWith("not valid JSON at byte "));
  EXPECT_THAT(refusal(std::string(1000000, '[')), HasSubstr("expected an object, got an array"));
  EXPECT_THAT(refusal(R"({"x": )" + std::string(1000000, '[')), StartsWith("not valid JSON"));
  EXPECT_LT(refusal(R"({"x": ")" + std::string(1000000, 'y')).size(), 300u);
  EXPECT_LT(refusal(tokenizer(R"({")" + std::string(1000000, 'y') + R"(": -1})")).size(), 300u);
}

TEST(TokenizerJson, RefusesFilesThatCannotBeRead) {
  const test::ScratchFolder folder;
  const std::string missing = folder.path("missing.json");
  EXPECT_THAT(test::caught([&] { read_tokenizer_json(missing); }).what(),
              StartsWith(missing + ": cannot read: "));
  EXPECT_THAT(test::caught([&] { read_tokenizer_json(folder.path("")); }).what(),
              HasSubstr("cannot read: "));
}

TEST(TokenizerJson, VocabularyChecksIds) {
  const Vocabulary vocabulary = vocabulary_of(tokenizer(R"({"a": 0})"));
  EXPECT_THROW((void)vocabulary.text(1), Error);
  EXPECT_THROW((void)vocabulary.raw_token(-1), Error);
  EXPECT_THROW((void)Vocabulary().text(0), Error);
}

}  // namespace
}  // namespace ehc::text
