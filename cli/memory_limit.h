// Memory is promised generously and missed late, so what cannot fit is refused before any work.
#pragma once

#include <string>

namespace ehc::cli {

// Error{unavailable} when `bytes` are most of this machine's memory. `what` needs them, `remedy`
// are the options that would help.
void require_memory(double bytes, const std::string& what, const std::string& remedy);

}  // namespace ehc::cli
