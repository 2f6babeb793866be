#include "text/utf8.h"

#include <algorithm>

namespace ehc::text {

Utf8Step decode_utf8(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {lead, 1, true};

  // The bounds of the second byte exclude overlong forms, surrogates and values beyond U+10FFFF.
  int length = 0;
  unsigned second_low = 0x80;
  unsigned second_high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) second_low = 0xA0;
    if (lead == 0xED) second_high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) second_low = 0x90;
    if (lead == 0xF4) second_high = 0x8F;
  } else {
    return {0, 1, false};
  }

  char32_t code_point = lead & (0x7Fu >> length);
  const int available =
      static_cast<int>(std::min<size_t>(text.size(), static_cast<size_t>(length)));
  for (int i = 1; i < available; ++i) {
    const unsigned next = byte(static_cast<size_t>(i));
    const bool fits = i == 1 ? next >= second_low && next <= second_high : (next & 0xC0u) == 0x80;
    if (!fits) return {0, i, false};
    code_point = code_point << 6 | (next & 0x3Fu);
  }
  return {code_point, available, available == length};
}

size_t find_invalid_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = decode_utf8(text.substr(i));
    if (!step.valid) return i;
    i += static_cast<size_t>(step.length);
  }
  return std::string_view::npos;
}

void append_utf8(char32_t code_point, std::string& out) {
  const auto put = [&](char32_t bits) { out += static_cast<char>(bits); };
  const auto put_continuation = [&](int shift) { put(0x80 | (code_point >> shift & 0x3F)); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | code_point >> 6);
    put_continuation(0);
  } else if (code_point < 0x10000) {
    put(0xE0 | code_point >> 12);
    put_continuation(6);
    put_continuation(0);
  } else {
    put(0xF0 | code_point >> 18);
    put_continuation(12);
    put_continuation(6);
    put_continuation(0);
  }
}

void append_utf8_lossy(std::string_view bytes, std::string& out) {
  while (!bytes.empty()) {
    const Utf8Step step = decode_utf8(bytes);
    const auto length = static_cast<size_t>(step.length);
    out += step.valid ? bytes.substr(0, length) : kReplacementCharacter;
    bytes.remove_prefix(length);
  }
}

}  // namespace ehc::text
