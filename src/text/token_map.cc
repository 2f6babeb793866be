// engram.token_map: one pass over the ids, one hash table from key to compressed id.
#include "text/token_map.h"

#include <cstddef>
#include <limits>
#include <string>
#include <unordered_map>

#include "ehc/error.h"
#include "ehc/text.h"
#include "text/normalize.h"
#include "text/utf8.h"

namespace ehc::text {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw Error(ErrorKind::contract, "engram.token_map: " + what);
}

std::string_view string_at(const TokenStrings& strings, size_t id) {
  const auto begin = static_cast<size_t>(strings.offsets[id]);
  return strings.bytes.substr(begin, static_cast<size_t>(strings.offsets[id + 1]) - begin);
}

struct KeyHash {
  using is_transparent = void;
  size_t operator()(std::string_view key) const { return std::hash<std::string_view>{}(key); }
};

}  // namespace

std::string normalize(std::string_view text) {
  const size_t position = find_invalid_utf8(text);
  if (position != std::string_view::npos) {
    throw Error(ErrorKind::contract,
                "normalize: 'text': expected UTF-8, got an invalid sequence at byte " +
                    std::to_string(position));
  }
  std::string normalized;
  normalize_into(text, normalized);
  return normalized;
}

void check_token_strings(const TokenStrings& strings, const char* bytes_name,
                         const char* offsets_name) {
  const std::span<const int64_t> offsets = strings.offsets;
  const auto refuse = [&](const std::string& expected, size_t at) {
    fail(std::string("tensor '") + offsets_name + "': expected " + expected + ", got " +
         std::to_string(offsets[at]) + " at position " + std::to_string(at));
  };
  if (offsets.front() != 0) refuse("a first element 0", 0);
  for (size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1]) refuse("elements that do not decrease", i);
  }
  if (static_cast<uint64_t>(offsets.back()) != strings.bytes.size()) {
    refuse("a last element " + std::to_string(strings.bytes.size()) + ", the size of '" +
               bytes_name + "'",
           offsets.size() - 1);
  }
  for (size_t id = 0; id + 1 < offsets.size(); ++id) {
    const size_t at = find_invalid_utf8(string_at(strings, id));
    if (at == std::string_view::npos) continue;
    fail(std::string("tensor '") + bytes_name +
         "': expected UTF-8, got an invalid sequence at byte " + std::to_string(at) + " of id " +
         std::to_string(id));
  }
}

int32_t map_tokens(const TokenStrings& texts, const TokenStrings& raw_tokens,
                   std::span<int32_t> table) {
  std::unordered_map<std::string, int32_t, KeyHash, std::equal_to<>> ids_of_keys;
  ids_of_keys.reserve(table.size());
  std::string normalized;
  for (size_t id = 0; id < table.size(); ++id) {
    const std::string_view text = string_at(texts, id);
    std::string_view key = string_at(raw_tokens, id);
    if (text.find(kReplacementCharacter) == std::string_view::npos) {
      normalize_into(text, normalized);
      key = normalized.empty() ? text : std::string_view(normalized);
    }
    auto entry = ids_of_keys.find(key);
    if (entry == ids_of_keys.end()) {
      entry = ids_of_keys.emplace(key, static_cast<int32_t>(ids_of_keys.size())).first;
    }
    table[id] = entry->second;
  }
  return static_cast<int32_t>(ids_of_keys.size());
}

int32_t build_token_map(std::span<const uint8_t> texts, std::span<const int64_t> text_offsets,
                        std::span<const uint8_t> raw_tokens, std::span<const int64_t> raw_offsets,
                        std::span<int32_t> table) {
  const size_t vocab = table.size();
  if (vocab > std::numeric_limits<int32_t>::max()) {
    fail("tensor 'table': expected at most 2147483647 ids, got " + std::to_string(vocab));
  }
  const auto strings = [&](const char* bytes_name, std::span<const uint8_t> bytes,
                           const char* offsets_name, std::span<const int64_t> offsets) {
    if (offsets.size() != vocab + 1) {
      fail(std::string("tensor '") + offsets_name + "': expected I64[" + std::to_string(vocab + 1) +
           "], got I64[" + std::to_string(offsets.size()) + "]");
    }
    const TokenStrings all = {{reinterpret_cast<const char*>(bytes.data()), bytes.size()}, offsets};
    check_token_strings(all, bytes_name, offsets_name);
    return all;
  };
  const TokenStrings text_strings = strings("texts", texts, "text_offsets", text_offsets);
  const TokenStrings raw_strings = strings("raw_tokens", raw_tokens, "raw_offsets", raw_offsets);
  return map_tokens(text_strings, raw_strings, table);
}

}  // namespace ehc::text
