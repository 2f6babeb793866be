// UTF-8: one strict decoder step, and what the text code builds on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ehc::text {

struct Utf8Step {
  char32_t code_point = 0;  // meaningful when valid
  int length = 0;           // bytes to skip, at least 1
  bool valid = false;       // false: the longest prefix of a sequence that went wrong
};

// Decodes the code point at the start of `text`, which must not be empty. Overlong forms,
// surrogates and values beyond U+10FFFF are invalid.
Utf8Step decode_utf8(std::string_view text);

// Position of the first byte that is not part of well-formed UTF-8; npos when there is none.
size_t find_invalid_utf8(std::string_view text);

void append_utf8(char32_t code_point, std::string& out);

// Appends `bytes` with every ill-formed piece replaced by one U+FFFD, cut into pieces the way
// Unicode recommends ("maximal subparts") and Rust's from_utf8_lossy does.
void append_utf8_lossy(std::string_view bytes, std::string& out);

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

}  // namespace ehc::text
