// Everything up to lowercase is a map of single code points: composing and decomposing again is
// decomposing, and the only code points that canonical ordering moves are marks, which are dropped.
// tools/generate_unicode_tables.py proves it over all code points when it writes the table.
#include "text/normalize.h"

#include <array>
#include <cstddef>
#include <cstdint>

#include "ehc/text.h"
#include "text/utf8.h"

namespace ehc::text {
namespace {

#include "text/unicode_tables_9_0.inc"

constexpr char32_t kHangulFirst = 0xAC00;
constexpr char32_t kHangulLast = 0xD7A3;
constexpr char32_t kLeadingJamo = 0x1100;
constexpr char32_t kVowelJamo = 0x1161;
constexpr char32_t kTrailingJamo = 0x11A7;  // one before the first: 0 means no trailing jamo
constexpr char32_t kVowels = 21;
constexpr char32_t kTrailings = 28;

void append_jamo(char32_t syllable, std::string& out) {
  const char32_t index = syllable - kHangulFirst;
  const char32_t trailing = index % kTrailings;
  append_utf8(kLeadingJamo + index / (kVowels * kTrailings), out);
  append_utf8(kVowelJamo + index / kTrailings % kVowels, out);
  if (trailing != 0) append_utf8(kTrailingJamo + trailing, out);
}

// Appends lowercase(drop_marks(decompose(code_point))); `source` is the code point's own UTF-8.
void append_mapped(char32_t code_point, std::string_view source, std::string& out) {
  if (code_point >= kHangulFirst && code_point <= kHangulLast) {
    append_jamo(code_point, out);
    return;
  }
  if (code_point >= kMappingLimit) {
    out += source;
    return;
  }
  const size_t block = kMappingIndex[code_point / kMappingBlock];
  const size_t offset = kMappingBlocks[block * kMappingBlock + code_point % kMappingBlock];
  if (offset == 0) {
    out += source;
  } else if (offset > 1) {
    const auto* replacement = reinterpret_cast<const char*>(kReplacements.data()) + offset;
    out.append(replacement + 1, static_cast<unsigned char>(*replacement));
  }
}

bool is_white_space(char32_t code_point) {
  for (const auto& [first, last] : kWhiteSpaceRanges) {
    if (code_point >= first && code_point <= last) return true;
  }
  return false;
}

bool is_collapsed(char byte) { return byte == ' ' || byte == '\t' || byte == '\r' || byte == '\n'; }

// Every run of space, tab, CR and LF becomes one space.
void collapse_white_space(std::string& text) {
  size_t kept = 0;
  bool in_run = false;
  for (const char byte : text) {
    const bool collapsed = is_collapsed(byte);
    if (!collapsed || !in_run) text[kept++] = collapsed ? ' ' : byte;
    in_run = collapsed;
  }
  text.resize(kept);
}

// Removes Unicode white space at both ends.
void strip_white_space(std::string& text) {
  const std::string_view all = text;
  size_t begin = all.size();
  size_t end = all.size();
  for (size_t i = 0; i < all.size();) {
    const Utf8Step step = decode_utf8(all.substr(i));
    const size_t next = i + static_cast<size_t>(step.length);
    if (!is_white_space(step.code_point)) {
      if (begin == all.size()) begin = i;
      end = next;
    }
    i = next;
  }
  text.erase(end);
  text.erase(0, begin);
}

}  // namespace

void normalize_into(std::string_view text, std::string& out) {
  out.clear();
  while (!text.empty()) {
    const Utf8Step step = decode_utf8(text);
    const auto length = static_cast<size_t>(step.length);
    append_mapped(step.code_point, text.substr(0, length), out);
    text.remove_prefix(length);
  }
  collapse_white_space(out);
  if (out != " ") strip_white_space(out);
}

std::string_view unicode_table_version() { return kUnicodeTableVersion; }

}  // namespace ehc::text
