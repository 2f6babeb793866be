#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "ehc/c_api.h"
#include "ehc/text.h"

namespace ehc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Map = std::unique_ptr<ehc_token_map, decltype(&ehc_token_map_destroy)>;

std::vector<int32_t> table_of(const ehc_token_map* map) {
  const ehc_token_map_info* info = ehc_token_map_describe(map);
  return {info->table, info->table + info->vocab_size};
}

std::string key_of(const std::string& text) {
  size_t length = 0;
  EXPECT_EQ(ehc_normalize(text.data(), text.size(), nullptr, 0, &length), EHC_OK);
  std::string key(length, '?');
  EXPECT_EQ(ehc_normalize(text.data(), text.size(), key.data(), key.size(), &length), EHC_OK);
  EXPECT_EQ(length, key.size());
  return key;
}

TEST(CApiTokenMap, BuildsSavesAndLoads) {
  const std::string json = testing::TempDir() + "c_api_tokenizer.json";
  const std::string path = testing::TempDir() + "c_api.map";
  std::ofstream(json) << R"({"model": {"type": "BPE", "vocab": {"a": 0, "A": 1, "b": 2}},)"
                      << R"("added_tokens": [], "decoder": {"type": "ByteLevel"}})";
  ehc_token_map* raw = nullptr;
  ASSERT_EQ(ehc_token_map_build(json.c_str(), &raw), EHC_OK) << ehc_last_error();
  const Map built(raw, &ehc_token_map_destroy);
  EXPECT_THAT(table_of(raw), ElementsAre(0, 0, 1));
  EXPECT_EQ(ehc_token_map_describe(raw)->size, 2);

  ASSERT_EQ(ehc_token_map_save(raw, path.c_str()), EHC_OK) << ehc_last_error();
  ASSERT_EQ(ehc_token_map_load(path.c_str(), &raw), EHC_OK) << ehc_last_error();
  const Map loaded(raw, &ehc_token_map_destroy);
  EXPECT_EQ(table_of(built.get()), table_of(loaded.get()));
}

TEST(CApiTokenMap, RefusesWhatIsNotThere) {
  ehc_token_map* map = nullptr;
  EXPECT_EQ(ehc_token_map_build("/nowhere/tokenizer.json", &map), EHC_IO);
  EXPECT_THAT(ehc_last_error(), HasSubstr("/nowhere/tokenizer.json"));
  EXPECT_EQ(ehc_token_map_load("/nowhere/a.map", &map), EHC_IO);
  EXPECT_EQ(map, nullptr);
  EXPECT_EQ(ehc_token_map_load(nullptr, &map), EHC_CONTRACT);
  EXPECT_THAT(ehc_last_error(), HasSubstr("'path': expected a path, got null"));
  EXPECT_EQ(ehc_token_map_build("x", nullptr), EHC_CONTRACT);
  EXPECT_EQ(ehc_token_map_save(nullptr, "x"), EHC_CONTRACT);
  EXPECT_EQ(ehc_token_map_describe(nullptr), nullptr);
  ehc_token_map_destroy(nullptr);
}

TEST(CApiTokenMap, NormalizesAsTheLibraryDoes) {
  for (const std::string text : {"\u00c9t\u00e9  \t", " ", "", "\ufb01"}) {
    EXPECT_EQ(key_of(text), text::normalize(text));
  }
  size_t length = 0;
  EXPECT_EQ(ehc_normalize("\xff", 1, nullptr, 0, &length), EHC_CONTRACT);
  EXPECT_EQ(ehc_normalize(nullptr, 1, nullptr, 0, &length), EHC_CONTRACT);
  EXPECT_EQ(ehc_normalize("a", 1, nullptr, 1, &length), EHC_CONTRACT);
  EXPECT_EQ(ehc_normalize("a", 1, nullptr, 0, nullptr), EHC_CONTRACT);
}

}  // namespace
}  // namespace ehc
