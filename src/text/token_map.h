// The two halves of build_token_map (ehc/text.h), for callers that check before anything is
// written.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace ehc::text {

// String i is bytes [offsets[i], offsets[i+1]).
struct TokenStrings {
  std::string_view bytes;
  std::span<const int64_t> offsets;  // [V+1]
};

// Every string lies inside its bytes and is UTF-8, else Error{contract} of engram.token_map that
// names the tensor and the id.
void check_token_strings(const TokenStrings& strings, const char* bytes_name,
                         const char* offsets_name);

// Fills table[V] and returns V'. Precondition: both are checked and have V strings.
int32_t map_tokens(const TokenStrings& texts, const TokenStrings& raw_tokens,
                   std::span<int32_t> table);

}  // namespace ehc::text
