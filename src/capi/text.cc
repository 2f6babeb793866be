// Token maps through the C interface.
#include "ehc/text.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "capi/status.h"

using ehc::capi::guarded;
using ehc::capi::guarded_value;
using ehc::capi::not_null;
using ehc::text::TokenMap;

struct ehc_token_map {
  explicit ehc_token_map(TokenMap source)
      : map(std::move(source)), info{map.table().data(), map.vocab_size(), map.size()} {}
  TokenMap map;
  ehc_token_map_info info;  // points into `map`
};

namespace {

template <class Make>
ehc_status make_map(const char* function, const char* path, ehc_token_map** map, const Make& make) {
  return guarded([&] {
    ehc_token_map*& out = not_null(map, function, "map", "a place for it");
    out = nullptr;
    out = new ehc_token_map(make(std::string(&not_null(path, function, "path", "a path"))));
  });
}

}  // namespace

extern "C" {

ehc_status ehc_token_map_build(const char* tokenizer_json, ehc_token_map** map) {
  return make_map("ehc_token_map_build", tokenizer_json, map, &TokenMap::build);
}

ehc_status ehc_token_map_load(const char* path, ehc_token_map** map) {
  return make_map("ehc_token_map_load", path, map, &TokenMap::load);
}

ehc_status ehc_token_map_save(const ehc_token_map* map, const char* path) {
  return guarded([&] {
    constexpr const char* kFunction = "ehc_token_map_save";
    const TokenMap& source = not_null(map, kFunction, "map", "a map").map;
    source.save(&not_null(path, kFunction, "path", "a path"));
  });
}

void ehc_token_map_destroy(ehc_token_map* map) { delete map; }

const ehc_token_map_info* ehc_token_map_describe(const ehc_token_map* map) {
  return guarded_value<const ehc_token_map_info*>(
      nullptr, [&] { return &not_null(map, "ehc_token_map_describe", "map", "a map").info; });
}

ehc_status ehc_normalize(const char* text, size_t bytes, char* key, size_t capacity,
                         size_t* length) {
  return guarded([&] {
    constexpr const char* kFunction = "ehc_normalize";
    size_t& needed = not_null(length, kFunction, "length", "a place for it");
    if (bytes > 0) not_null(text, kFunction, "text", "a text");
    if (capacity > 0) not_null(key, kFunction, "key", "a place for it");
    const std::string normalized = ehc::text::normalize({bytes > 0 ? text : "", bytes});
    needed = normalized.size();
    std::copy_n(normalized.data(), std::min(capacity, needed), key);
  });
}

}  // extern "C"
