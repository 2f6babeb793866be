// Texts of values in error messages.
#pragma once

#include <string>
#include <string_view>

namespace ehc {

// The shortest decimal text that reads back as the same number: "1e-20", "0.1", "nan".
[[nodiscard]] std::string number_text(double value);

// `text` in quotes on one line: control and non-ASCII bytes escaped, cut after 80 bytes.
[[nodiscard]] std::string in_quotes(std::string_view text);

}  // namespace ehc
