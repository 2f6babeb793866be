// Arguments of the token map builders; host only.
#pragma once

#include <cstdint>
#include <span>

#include "text/token_map.h"

namespace ehc::engram {

struct TokenMapArgs {
  text::TokenStrings texts;
  text::TokenStrings raw_tokens;
  std::span<int32_t> table;  // [V]
};

}  // namespace ehc::engram
