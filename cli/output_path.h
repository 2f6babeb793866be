// Paths of files that a command writes at its end.
#pragma once

#include <string>

namespace ehc::cli {

// Told before any work: throws Error{io} for a path that can never be written.
void require_writable(const std::string& path);

}  // namespace ehc::cli
