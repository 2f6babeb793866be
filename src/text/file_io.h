// Whole files in and out.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ehc::text {

// Throws Error{io} when the file cannot be read or is larger than `max_bytes`.
std::string read_file(const std::string& path, size_t max_bytes);

// Writes beside `path` and renames, so that `path` is never half written. Throws Error{io}; nothing
// is then left behind and an older file is unchanged. Only regular files are replaced.
void write_file_atomically(const std::string& path, std::string_view contents);

}  // namespace ehc::text
