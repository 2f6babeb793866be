// engram.token_map: one pass over the ids, one hash table from key to compressed id.
#include <cstddef>
#include <limits>
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

// Strings of one tensor pair, checked once so that every later access is in bounds.
class Strings {
 public:
  Strings(const char* bytes_name, std::span<const uint8_t> bytes, std::span<const int64_t> offsets)
      : bytes_name_(bytes_name),
        bytes_(reinterpret_cast<const char*>(bytes.data()), bytes.size()),
        offsets_(offsets) {}

  // A string that is not UTF-8 has no place in a vocabulary and is refused by id.
  std::string_view utf8(size_t id) const {
    const auto begin = static_cast<size_t>(offsets_[id]);
    const std::string_view string =
        bytes_.substr(begin, static_cast<size_t>(offsets_[id + 1]) - begin);
    const size_t position = find_invalid_utf8(string);
    if (position != std::string_view::npos) {
      fail(std::string("tensor '") + bytes_name_ +
           "': expected UTF-8, got an invalid sequence at byte " + std::to_string(position) +
           " of id " + std::to_string(id));
    }
    return string;
  }

  void check_offsets(const char* offsets_name) const {
    const std::string tensor = std::string("tensor '") + offsets_name + "': expected ";
    if (offsets_.front() != 0) {
      fail(tensor + "a first value of 0, got " + std::to_string(offsets_.front()));
    }
    for (size_t i = 1; i < offsets_.size(); ++i) {
      if (offsets_[i] < offsets_[i - 1]) {
        fail(tensor + "values that do not decrease, got " + std::to_string(offsets_[i]) +
             " after " + std::to_string(offsets_[i - 1]) + " at index " + std::to_string(i));
      }
    }
    if (static_cast<uint64_t>(offsets_.back()) != bytes_.size()) {
      fail(tensor + "a last value of " + std::to_string(bytes_.size()) + " (the size of '" +
           bytes_name_ + "'), got " + std::to_string(offsets_.back()));
    }
  }

 private:
  const char* bytes_name_;
  std::string_view bytes_;
  std::span<const int64_t> offsets_;
};

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

int32_t build_token_map(std::span<const uint8_t> texts, std::span<const int64_t> text_offsets,
                        std::span<const uint8_t> raw_tokens, std::span<const int64_t> raw_offsets,
                        std::span<int32_t> table) {
  const size_t vocab = table.size();
  if (vocab > std::numeric_limits<int32_t>::max()) {
    fail("tensor 'table': expected at most 2147483647 ids, got " + std::to_string(vocab));
  }
  const auto check_length = [&](const char* name, std::span<const int64_t> offsets) {
    if (offsets.size() != vocab + 1) {
      fail(std::string("tensor '") + name + "': expected I64[" + std::to_string(vocab + 1) +
           "], got I64[" + std::to_string(offsets.size()) + "]");
    }
  };
  check_length("text_offsets", text_offsets);
  check_length("raw_offsets", raw_offsets);
  const Strings text_strings("texts", texts, text_offsets);
  const Strings raw_strings("raw_tokens", raw_tokens, raw_offsets);
  text_strings.check_offsets("text_offsets");
  raw_strings.check_offsets("raw_offsets");

  std::unordered_map<std::string, int32_t, KeyHash, std::equal_to<>> ids_of_keys;
  ids_of_keys.reserve(vocab);
  std::string normalized;
  for (size_t id = 0; id < vocab; ++id) {
    const std::string_view text = text_strings.utf8(id);
    const std::string_view raw = raw_strings.utf8(id);
    std::string_view key = raw;
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

}  // namespace ehc::text
