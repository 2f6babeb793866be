// The metadata of `ehc op` files: strict, and all of it read before anything runs.
#include "cli/op_file.h"

#include <gtest/gtest.h>

#include "core/registry.h"
#include "ehc/error.h"

namespace ehc::cli {
namespace {

// The error of binding a file of engram.offsets with this metadata, or "accepted".
std::string answer(const std::optional<std::string>& metadata) {
  static constexpr int32_t kSizes[1] = {7};
  OpFile file;
  file.inputs["vocab_sizes"] = Tensor(kSizes, DType::i32, {1, 1, 1});
  file.metadata = metadata;
  DynamicCall call(*find_operator("engram.offsets"));
  try {
    bind_op_file(call, file, {});
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::contract);
    return e.what();
  }
  return "accepted";
}

TEST(OpFileMetadata, IsAJsonObjectWhereItIsThere) {
  EXPECT_EQ(answer(std::nullopt), "accepted");
  EXPECT_EQ(answer("{}"), "accepted");
  for (const std::string text : {"", " ", "null", "[]", "{", "{} {}"}) {
    EXPECT_EQ(answer(text),
              "engram.offsets: metadata 'ehc': expected a JSON object, got '" + text + "'");
  }
}

TEST(OpFileMetadata, HasEveryKeyOnce) {
  const auto twice = [](const std::string& key) {
    return "engram.offsets: metadata 'ehc': expected every key once, got '" + key + "' twice";
  };
  EXPECT_EQ(answer(R"({"set": {}, "set": {}})"), twice("set"));
  EXPECT_EQ(answer(R"({"set": {"index_dtype": "I32", "index_dtype": "I64"}})"),
            twice("index_dtype"));
  EXPECT_EQ(answer(R"({"tolerance": {"offsets": [0, 0], "offsets": [9, 9]}})"), twice("offsets"));
  EXPECT_EQ(answer(R"({"": 1, "": 2})"), twice(""));
  EXPECT_EQ(answer(R"({"set": {}, "tolerance": {}})"), "accepted");
}

TEST(OpFileMetadata, TolerancesAreCheckedBeforeTheRun) {
  const std::string begin = "engram.offsets: metadata 'tolerance': ";
  EXPECT_EQ(answer(R"({"tolerance": {"offsets": [1, 0.5]}})"), "accepted");
  EXPECT_EQ(answer(R"({"tolerance": {"offset": [1, 0.5]}})"),
            begin + "expected names of outputs, got 'offset'");
  EXPECT_EQ(answer(R"({"tolerance": {"vocab_sizes": [1, 0.5]}})"),
            begin + "expected names of outputs, got 'vocab_sizes'");
  EXPECT_EQ(answer(R"({"tolerance": []})"), begin + "expected an object, got an array");
  for (const std::string rule : {"1", "\"x\"", "-1"}) {
    EXPECT_EQ(
        answer(R"({"tolerance": {"offsets": )" + rule + "}}"),
        begin + "'offsets': expected [ulp, abs] or [ulp, abs, share] of numbers >= 0, got " + rule);
  }
  for (const char* rule : {"[1]", "[1, 2, 3, 4]", "[1, -2]", "[1, null]", "[1, 2, \"all\"]"}) {
    EXPECT_EQ(answer(R"({"tolerance": {"offsets": )" + std::string(rule) + "}}"),
              begin +
                  "'offsets': expected [ulp, abs] or [ulp, abs, share] of numbers >= 0, got an "
                  "array");
  }
}

}  // namespace
}  // namespace ehc::cli
