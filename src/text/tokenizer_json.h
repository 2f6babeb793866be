// Reading `tokenizer.json`; the rules stand at `read_tokenizer_json` in ehc/text.h.
#pragma once

#include <string>
#include <string_view>

#include "ehc/text.h"

namespace ehc::text {

std::string read_tokenizer_bytes(const std::string& path);

// `path` is only named in errors.
Vocabulary parse_tokenizer_json(const std::string& path, std::string_view json);

}  // namespace ehc::text
