// The rule of contract 1.1 with an ordered map of copied keys.
#include <map>
#include <string>

#include "ehc/text.h"
#include "ops/engram/token_map/token_map_args.h"

namespace ehc::engram {

namespace {

std::string token(std::span<const uint8_t> bytes, std::span<const int64_t> offsets, size_t id) {
  return {bytes.begin() + offsets[id], bytes.begin() + offsets[id + 1]};
}

}  // namespace

int32_t token_map_reference(const TokenMapArgs& a) {
  std::map<std::string, int32_t> ids;
  for (size_t id = 0; id < a.table.size(); ++id) {
    const std::string text = token(a.texts, a.text_offsets, id);
    std::string key;
    if (text.find("\xEF\xBF\xBD") != std::string::npos) {  // U+FFFD
      key = token(a.raw_tokens, a.raw_offsets, id);
    } else {
      key = text::normalize(text);
      if (key.empty()) key = text;
    }
    a.table[id] = ids.emplace(key, static_cast<int32_t>(ids.size())).first->second;
  }
  return static_cast<int32_t>(ids.size());
}

}  // namespace ehc::engram
