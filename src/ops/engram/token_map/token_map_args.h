// Arguments of the token map builders; host only.
#pragma once

#include <cstdint>
#include <span>

namespace ehc::engram {

struct TokenMapArgs {
  std::span<const uint8_t> texts;
  std::span<const int64_t> text_offsets;  // [V+1]
  std::span<const uint8_t> raw_tokens;
  std::span<const int64_t> raw_offsets;  // [V+1]
  std::span<int32_t> table;              // [V]
};

}  // namespace ehc::engram
