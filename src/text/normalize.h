// The normaliser of the token map: NFKC, NFD, drop marks, lowercase, collapse white space, strip.
#pragma once

#include <string>
#include <string_view>

namespace ehc::text {

// Replaces `out` with the normalised `text`, which must be well-formed UTF-8.
// Unicode 9.0 decompositions and marks, lowercase per code point; one space alone survives.
void normalize_into(std::string_view text, std::string& out);

}  // namespace ehc::text
