#define XXH_INLINE_ALL
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <cstring>
#include <string>

#include "ehc/text.h"
#include "tests/text/support.h"

namespace ehc::text {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr size_t kHeaderBytes = 80;

std::string tokenizer(const std::string& last) {
  return R"({"decoder": {"type": "ByteLevel"}, "added_tokens": [], "model": {"type": "BPE",
             "vocab": {"a": 0, "A": 1, "b": 2, "\u0120a": 3, ")" +
         last + R"(": 4}, "merges": []}})";
}

class MapFile : public ::testing::Test {
 protected:
  // Loads the bytes as a map file and returns the error's text without the path.
  std::string refusal(const std::string& bytes) {
    const std::string path = folder.write("changed.map", bytes);
    const Error error = test::caught([&] { TokenMap::load(path); });
    EXPECT_EQ(error.kind(), ErrorKind::io);
    EXPECT_THAT(error.what(), StartsWith(path + ": "));
    return std::string(error.what()).substr(path.size() + 2);
  }

  // A lying file: `bytes` put at `at`, with a checksum that matches.
  template <class T>
  std::string with(size_t at, T value) const {
    std::string bytes = whole;
    std::memcpy(bytes.data() + at, &value, sizeof(value));
    const size_t covered = bytes.size() - sizeof(uint64_t);
    const uint64_t checksum = XXH64(bytes.data(), covered, 0);
    std::memcpy(bytes.data() + covered, &checksum, sizeof(checksum));
    return bytes;
  }

  std::string saved() const {
    TokenMap::build(tokenizer_path).save(map_path);
    return test::read(map_path);
  }

  test::ScratchFolder folder;
  std::string tokenizer_path = folder.write("tokenizer.json", tokenizer("c"));
  std::string map_path = folder.path("token.map");
  std::string whole = saved();
};

TEST_F(MapFile, RoundTrips) {
  const TokenMap map = TokenMap::load(map_path);
  EXPECT_THAT(map.table(), ElementsAre(0, 0, 1, 0, 2));
  EXPECT_EQ(map.size(), 3);
  EXPECT_EQ(map.vocab_size(), 5);
  const std::string source = test::read(tokenizer_path);
  EXPECT_EQ(map.source_bytes(), source.size());
  EXPECT_EQ(map.source_hash(), XXH64(source.data(), source.size(), 0));
  EXPECT_EQ(whole.size(), kHeaderBytes + 5 * sizeof(int32_t) + sizeof(uint64_t));
  map.verify(tokenizer_path);
  map.save(map_path);
  EXPECT_EQ(test::read(map_path), whole);
}

TEST_F(MapFile, EmptyMapRoundTrips) {
  const std::string path = folder.write("empty.json", R"({"decoder": {"type": "ByteLevel"},
      "model": {"type": "BPE", "vocab": {}}})");
  TokenMap::build(path).save(map_path);
  EXPECT_EQ(TokenMap::load(map_path).vocab_size(), 0);
  EXPECT_EQ(TokenMap::load(map_path).size(), 0);
}

TEST_F(MapFile, RefusesEveryTruncationAndTrailingBytes) {
  for (size_t length = 0; length < whole.size(); ++length) {
    const std::string text = refusal(whole.substr(0, length));
    EXPECT_EQ(text, length < kHeaderBytes
                        ? "not a token map file"
                        : "truncated: expected 108 bytes for 5 ids, got " + std::to_string(length));
  }
  EXPECT_EQ(refusal(whole + "x"), "trailing bytes: expected 108 bytes for 5 ids, got 109");
}

TEST_F(MapFile, RefusesEveryFlippedBit) {
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string bytes = whole;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
    EXPECT_NE(refusal(bytes), "") << bit;
  }
}

TEST_F(MapFile, RefusesLyingFilesWithAGoodChecksum) {
  EXPECT_EQ(refusal(with(0, 'X')), "not a token map file");
  EXPECT_EQ(refusal(with(8, uint32_t{2})), "expected format version 1, got 2");
  EXPECT_EQ(refusal(with(16, uint64_t{1} << 62)),
            "expected at most 2147483647 ids, got 4611686018427387904");
  EXPECT_THAT(refusal(with(16, uint64_t{2147483647})), StartsWith("truncated: "));
  EXPECT_EQ(refusal(with(40 + 8, '8')),
            "expected Unicode tables 'unicode-9.0-lower-17.0', got 'unicode-8.0-lower-17.0': build "
            "the map again");
  EXPECT_EQ(refusal(with(12, uint32_t{4})), "expected 4 distinct compressed ids, got 3");
  EXPECT_EQ(refusal(with(12, uint32_t{2})), "expected id 4 to map to 0..1, got 2");
  EXPECT_EQ(refusal(with(kHeaderBytes, int32_t{-1})), "expected id 0 to map to 0..0, got -1");
  EXPECT_EQ(refusal(with(kHeaderBytes + 16, int32_t{3})), "expected id 4 to map to 0..2, got 3");
  EXPECT_EQ(refusal(with(kHeaderBytes + 8, int32_t{0})), "expected id 4 to map to 0..1, got 2");
}

TEST_F(MapFile, RefusesOtherFiles) {
  EXPECT_EQ(refusal(""), "not a token map file");
  EXPECT_EQ(refusal(test::read(tokenizer_path)), "not a token map file");
  EXPECT_THAT(test::caught([&] { TokenMap::load(folder.path("missing")); }).what(),
              HasSubstr("cannot read: "));
}

TEST_F(MapFile, RefusesStaleMaps) {
  const TokenMap map = TokenMap::load(map_path);
  const std::string same_size = folder.write("same_size.json", tokenizer("d"));
  const std::string longer = folder.write("longer.json", tokenizer("dd"));
  EXPECT_THAT(test::caught([&] { map.verify(same_size); }).what(), HasSubstr("with another hash"));
  EXPECT_THAT(test::caught([&] { map.verify(longer); }).what(),
              HasSubstr("the map was built from another file: expected"));
  // Right source, but the table is not what the source gives.
  const std::string path = folder.write("lying.map", with(kHeaderBytes + 12, int32_t{1}));
  EXPECT_THAT(test::caught([&] { TokenMap::load(path).verify(tokenizer_path); }).what(),
              HasSubstr("the map differs from the one this file gives"));
}

TEST_F(MapFile, AFailedWriteLeavesTheOldFile) {
  // A limit on the file size stands in for a full disk.
  rlimit old_limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const auto old_handler = signal(SIGXFSZ, SIG_IGN);
  const TokenMap map = TokenMap::load(map_path);
  const size_t files = folder.file_count();
  const rlimit small{64, old_limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const Error error = test::caught([&] { map.save(map_path); });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  signal(SIGXFSZ, old_handler);
  EXPECT_EQ(error.kind(), ErrorKind::io);
  EXPECT_THAT(error.what(), StartsWith(map_path + ": cannot write: "));
  EXPECT_EQ(test::read(map_path), whole);
  EXPECT_EQ(folder.file_count(), files);
}

TEST_F(MapFile, RefusesTargetsThatCannotBeWritten) {
  const TokenMap map = TokenMap::load(map_path);
  EXPECT_THAT(test::caught([&] { map.save(folder.path("no/such/folder.map")); }).what(),
              HasSubstr("cannot write: "));
  EXPECT_THAT(test::caught([&] { map.save(folder.path("")); }).what(),
              HasSubstr("cannot write: not a regular file"));
  EXPECT_THAT(test::caught([&] { map.save("/dev/null"); }).what(),
              HasSubstr("cannot write: not a regular file"));
}

TEST_F(MapFile, WritesThroughLinks) {
  const std::string link = folder.path("link.map");
  const std::string target = folder.write("target.map", "old");
  std::filesystem::create_symlink(target, link);
  TokenMap::load(map_path).save(link);
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_EQ(test::read(target), whole);
}

}  // namespace
}  // namespace ehc::text
