// From the ids of a tokenizer to the smaller set of ids that the n-gram hash works on: tokens that
// differ only in case, accents, compatibility forms or surrounding white space share one id.
// Formula: docs/ops/engram.md, contract 1.1. Exact, the same on every machine; host only.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ehc/export.h"

namespace ehc::text {

// The key of a token's text: NFKC, NFD, drop marks (general category M), lowercase each code point
// by itself, collapse every run of space, tab, CR and LF to one space, strip Unicode white space at
// both ends unless exactly one space is left. The result may be empty.
// Decompositions and marks are those of Unicode 9.0, as in the Hugging Face normalizers; see
// `unicode_table_version`. Throws Error{contract} when `text` is not UTF-8.
EHC_API std::string normalize(std::string_view text);

// Name of the Unicode tables inside the library, e.g. "unicode-9.0-lower-17.0". Maps built with
// different tables may differ.
EHC_API std::string_view unicode_table_version();

// The V tokens of a vocabulary in id order. Token i of `texts` is bytes
// [text_offsets[i], text_offsets[i + 1]); `raw_tokens` likewise.
struct Vocabulary {
  std::string texts;                  // what each id alone decodes to, special tokens kept
  std::vector<int64_t> text_offsets;  // [V + 1]
  std::string raw_tokens;             // the strings of the vocabulary itself
  std::vector<int64_t> raw_offsets;   // [V + 1]

  [[nodiscard]] int64_t size() const { return static_cast<int64_t>(text_offsets.size()) - 1; }
  // Throw Error{contract} when `id` is not in 0..V-1. The views are into this object.
  [[nodiscard]] EHC_API std::string_view text(int64_t id) const;
  [[nodiscard]] EHC_API std::string_view raw_token(int64_t id) const;
};

// Reads a Hugging Face `tokenizer.json` with a BPE model and a ByteLevel decoder. Ids of the
// model's vocabulary and of the added tokens together must be 0..V-1 without a hole; one token has
// one id. Each id is decoded by itself as the `tokenizers` library does with
// skip_special_tokens=False: a token made only of the 256 byte characters is those bytes, any other
// is its own UTF-8; what is not UTF-8 then becomes U+FFFD. Throws Error{io}, naming the file and
// what is wrong.
EHC_API Vocabulary read_tokenizer_json(const std::string& path);

// engram.token_map: table[id] is the compressed id of token id, `return` the number V' of
// compressed ids. Ids are taken in ascending order; a token's key is its raw string when its text
// holds U+FFFD, else normalize(text), else (when that is empty) the text itself. Keys of all three
// kinds share one namespace, and each new key takes the next compressed id.
//   texts, raw_tokens            uint8[bytes], UTF-8
//   text_offsets, raw_offsets    int64[V + 1], from 0, not decreasing, to the number of bytes
//   table                        int32[V], written; must not overlap the inputs
// V = 0 is legal and gives 0. Throws Error{contract} naming the tensor and, where there is one, the
// id, before anything is written. Allocates a hash table of the keys.
EHC_API int32_t build_token_map(std::span<const uint8_t> texts,
                                std::span<const int64_t> text_offsets,
                                std::span<const uint8_t> raw_tokens,
                                std::span<const int64_t> raw_offsets, std::span<int32_t> table);

// A token map together with where it came from.
class EHC_API TokenMap {
 public:
  // Errors: those of `read_tokenizer_json`.
  static TokenMap build(const std::string& tokenizer_json);

  // Reads a map file. Throws Error{io} when it is not one, is truncated, has trailing bytes, a
  // wrong checksum, ids that do not appear in order, or was made with other Unicode tables than
  // ours.
  static TokenMap load(const std::string& path);

  // Writes the file under another name first, then renames it: readers see the old file or the
  // whole new one. Throws Error{io}; the target is then unchanged.
  void save(const std::string& path) const;

  // Throws Error{io} unless this map is the one that `tokenizer_json`, as it is now, gives.
  void verify(const std::string& tokenizer_json) const;

  [[nodiscard]] std::span<const int32_t> table() const { return table_; }  // int32[V], values < V'
  [[nodiscard]] int64_t vocab_size() const { return static_cast<int64_t>(table_.size()); }  // V
  [[nodiscard]] int32_t size() const { return size_; }                                      // V'
  [[nodiscard]] uint64_t source_bytes() const {
    return source_bytes_;
  }                                                                    // size of the tokenizer.json
  [[nodiscard]] uint64_t source_hash() const { return source_hash_; }  // its XXH64, seed 0

 private:
  TokenMap() = default;
  std::vector<int32_t> table_;
  int32_t size_ = 0;
  uint64_t source_bytes_ = 0;
  uint64_t source_hash_ = 0;
};

}  // namespace ehc::text
