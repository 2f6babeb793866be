// The rule of contract 1.1 with an ordered map of copied keys.
#include <map>
#include <string>

#include "ehc/text.h"
#include "ops/engram/token_map/token_map_args.h"

namespace ehc::engram {

namespace {

std::string token(const text::TokenStrings& strings, size_t id) {
  return {strings.bytes.begin() + strings.offsets[id],
          strings.bytes.begin() + strings.offsets[id + 1]};
}

}  // namespace

int32_t token_map_reference(const TokenMapArgs& a) {
  std::map<std::string, int32_t> ids;
  for (size_t id = 0; id < a.table.size(); ++id) {
    const std::string text = token(a.texts, id);
    std::string key;
    if (text.find("\xEF\xBF\xBD") != std::string::npos) {  // U+FFFD
      key = token(a.raw_tokens, id);
    } else {
      key = text::normalize(text);
      if (key.empty()) key = text;
    }
    a.table[id] = ids.emplace(key, static_cast<int32_t>(ids.size())).first->second;
  }
  return static_cast<int32_t>(ids.size());
}

}  // namespace ehc::engram
