// engram.token_map: the compressed id of every token id of a vocabulary.
#pragma once

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// Token i of `texts` is bytes [text_offsets[i], text_offsets[i+1]), `raw_tokens` likewise. The key
// of a token is its raw string when its text holds U+FFFD, else the normalised text
// (ehc::text::normalize), else, when that is empty, the text itself. Ids are taken in ascending
// order and each new key gets the next compressed id:
//   table[i] = number of distinct keys before the first token that has the key of token i,
//   size     = number of distinct keys, V'.
// Exact and host only. All tensors are contiguous, nothing may overlap an output. V = 0 is legal.
// Run once per tokenizer: this operator alone allocates memory of its own, a hash table of the
// keys. Contract 1.1. For a tokenizer.json see ehc::text::TokenMap.
struct TokenMap {
  Tensor texts{};         // U8[text_bytes], UTF-8: what each id alone decodes to
  Tensor text_offsets{};  // I64[V+1], from 0, not decreasing, to text_bytes
  Tensor raw_tokens{};    // U8[raw_bytes], UTF-8: the strings of the vocabulary
  Tensor raw_offsets{};   // I64[V+1]
  Tensor table{};         // out: I32[V], values in [0, V')
  Tensor size{};          // out: I32[1], V'
};

// Throws Error{contract} naming the tensor and the id: offsets that are none, strings that are not
// UTF-8, V above 2^31 - 1.
EHC_API void token_map(Context& context, const TokenMap& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const TokenMap& params);

}  // namespace ehc::engram
