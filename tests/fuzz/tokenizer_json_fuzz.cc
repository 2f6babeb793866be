// Any text: the tokenizer reader refuses it with Error{io}, or every token of the vocabulary it
// gives is a valid range and the vocabulary can be mapped.
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "ehc/error.h"
#include "text/tokenizer_json.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

std::span<const uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

void check_map(const ehc::text::Vocabulary& vocabulary) {
  require(vocabulary.raw_offsets.size() == vocabulary.text_offsets.size());
  std::vector<int32_t> table(static_cast<size_t>(vocabulary.size()), -1);
  const int32_t size =
      ehc::text::build_token_map(bytes_of(vocabulary.texts), vocabulary.text_offsets,
                                 bytes_of(vocabulary.raw_tokens), vocabulary.raw_offsets, table);
  require(size >= 0 && size <= vocabulary.size());
  for (const int32_t id : table) require(id >= 0 && id < size);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view json(reinterpret_cast<const char*>(data), size);
  ehc::text::Vocabulary vocabulary;
  try {
    vocabulary = ehc::text::parse_tokenizer_json("fuzz", json);
  } catch (const ehc::Error& error) {
    require(error.kind() == ehc::ErrorKind::io);
    return 0;
  }
  check_map(vocabulary);
  return 0;
}
