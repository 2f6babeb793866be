// The map file, little-endian:
//   0   magic "EHC-TMAP"
//   8   uint32 format version, uint32 V' (number of compressed ids)
//   16  uint64 V (number of ids)
//   24  uint64 bytes of the tokenizer.json, uint64 its XXH64
//   40  char[40] name of the Unicode tables, filled up with zeros
//   80  int32[V] the table
//   ..  uint64 XXH64 of everything before
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <limits>

#include "core/file_io.h"
#include "ehc/text.h"
#include "text/normalize.h"
#include "text/tokenizer_json.h"

namespace ehc::text {
namespace {

static_assert(std::endian::native == std::endian::little, "the map file is little-endian");

struct Header {
  std::array<char, 8> magic;
  uint32_t format_version;
  uint32_t compressed;
  uint64_t vocab;
  uint64_t source_bytes;
  uint64_t source_hash;
  std::array<char, 40> table_version;
};
static_assert(sizeof(Header) == 80);

constexpr std::array<char, 8> kMagic = {'E', 'H', 'C', '-', 'T', 'M', 'A', 'P'};
constexpr uint32_t kFormatVersion = 1;
constexpr size_t kMaxMapBytes = size_t{1} << 34;  // 2^31 ids and a little

uint64_t xxh64(std::string_view bytes) { return XXH64(bytes.data(), bytes.size(), 0); }

std::array<char, 40> padded_table_version() {
  std::array<char, 40> name{};
  const std::string_view version = unicode_table_version();
  std::copy_n(version.begin(), std::min(version.size(), name.size() - 1), name.begin());
  return name;
}

// New ids appear in ascending order, so one pass checks the range and that all of 0..V'-1 are used.
void check_table(const std::string& path, std::span<const int32_t> table, uint32_t compressed) {
  int64_t seen = 0;
  for (size_t id = 0; id < table.size(); ++id) {
    if (table[id] < 0 || table[id] > seen || table[id] >= static_cast<int64_t>(compressed)) {
      throw_io(path, "expected id " + std::to_string(id) + " to map to 0.." +
                         std::to_string(std::min<int64_t>(seen, int64_t{compressed} - 1)) +
                         ", got " + std::to_string(table[id]));
    }
    seen += table[id] == seen ? 1 : 0;
  }
  if (seen != static_cast<int64_t>(compressed)) {
    throw_io(path, "expected " + std::to_string(compressed) + " distinct compressed ids, got " +
                       std::to_string(seen));
  }
}

}  // namespace

TokenMap TokenMap::build(const std::string& tokenizer_json) {
  const std::string json = read_tokenizer_bytes(tokenizer_json);
  const Vocabulary vocabulary = parse_tokenizer_json(tokenizer_json, json);
  const auto bytes = [](const std::string& string) {
    return std::span(reinterpret_cast<const uint8_t*>(string.data()), string.size());
  };
  TokenMap map;
  map.source_bytes_ = json.size();
  map.source_hash_ = xxh64(json);
  map.table_.resize(static_cast<size_t>(vocabulary.size()));
  map.size_ = build_token_map(bytes(vocabulary.texts), vocabulary.text_offsets,
                              bytes(vocabulary.raw_tokens), vocabulary.raw_offsets, map.table_);
  return map;
}

TokenMap TokenMap::load(const std::string& path) {
  const std::string file = read_file(path, kMaxMapBytes);
  Header header;
  if (file.size() < sizeof(Header) || std::memcmp(file.data(), kMagic.data(), kMagic.size()) != 0) {
    throw_io(path, "not a token map file");
  }
  std::memcpy(&header, file.data(), sizeof(Header));
  if (header.format_version != kFormatVersion) {
    throw_io(path, "expected format version " + std::to_string(kFormatVersion) + ", got " +
                       std::to_string(header.format_version));
  }
  if (header.vocab > static_cast<uint64_t>(std::numeric_limits<int32_t>::max())) {
    throw_io(path, "expected at most 2147483647 ids, got " + std::to_string(header.vocab));
  }
  const size_t table_bytes = static_cast<size_t>(header.vocab) * sizeof(int32_t);
  const size_t expected_bytes = sizeof(Header) + table_bytes + sizeof(uint64_t);
  if (file.size() != expected_bytes) {
    throw_io(path, std::string(file.size() < expected_bytes ? "truncated" : "trailing bytes") +
                       ": expected " + std::to_string(expected_bytes) + " bytes for " +
                       std::to_string(header.vocab) + " ids, got " + std::to_string(file.size()));
  }
  uint64_t checksum = 0;
  std::memcpy(&checksum, file.data() + sizeof(Header) + table_bytes, sizeof(checksum));
  if (checksum != xxh64(std::string_view(file).substr(0, sizeof(Header) + table_bytes))) {
    throw_io(path, "checksum does not match the contents: the file is damaged");
  }
  if (header.table_version != padded_table_version()) {
    header.table_version.back() = '\0';
    throw_io(path, "expected Unicode tables '" + std::string(unicode_table_version()) + "', got '" +
                       header.table_version.data() + "': build the map again");
  }

  TokenMap map;
  map.table_.resize(static_cast<size_t>(header.vocab));
  if (table_bytes != 0) std::memcpy(map.table_.data(), file.data() + sizeof(Header), table_bytes);
  check_table(path, map.table_, header.compressed);
  map.size_ = static_cast<int32_t>(header.compressed);
  map.source_bytes_ = header.source_bytes;
  map.source_hash_ = header.source_hash;
  return map;
}

void TokenMap::save(const std::string& path) const {
  const Header header{kMagic,        kFormatVersion, static_cast<uint32_t>(size_), table_.size(),
                      source_bytes_, source_hash_,   padded_table_version()};
  std::string file(reinterpret_cast<const char*>(&header), sizeof(Header));
  file.append(reinterpret_cast<const char*>(table_.data()), table_.size() * sizeof(int32_t));
  const uint64_t checksum = xxh64(file);
  file.append(reinterpret_cast<const char*>(&checksum), sizeof(checksum));
  const std::string_view parts[] = {file};
  write_file(path, parts);
}

void TokenMap::verify(const std::string& tokenizer_json) const {
  const TokenMap fresh = build(tokenizer_json);
  if (fresh.source_bytes_ != source_bytes_ || fresh.source_hash_ != source_hash_) {
    throw_io(tokenizer_json,
             "the map was built from another file: expected " + std::to_string(source_bytes_) +
                 " bytes, got " + std::to_string(fresh.source_bytes_) +
                 (fresh.source_bytes_ == source_bytes_ ? " with another hash" : ""));
  }
  if (fresh.table_ != table_) {
    throw_io(tokenizer_json, "the map differs from the one this file gives: build it again");
  }
}

}  // namespace ehc::text
