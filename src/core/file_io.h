// Files as the table formats need them: bounded reads, atomic writes.
// Every failure is Error{io} whose one-line text starts with the path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "ehc/error.h"

namespace ehc {

// A regular file opened for reading (not a folder, pipe or device: those may never end).
class InputFile {
 public:
  explicit InputFile(const std::string& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }
  // Size when opened.
  [[nodiscard]] uint64_t size() const { return size_; }
  // Fills data[0 .. bytes) from byte `offset`; a file that has shrunk is an error.
  void read(uint64_t offset, void* data, uint64_t bytes) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  uint64_t size_ = 0;
};

// The bytes of a regular file; one that is larger than `max_bytes` is an error.
[[nodiscard]] std::string read_file(const std::string& path, uint64_t max_bytes);

// Replaces `path` by the concatenated parts: temporary file in the same folder, fsync, rename. A
// link stays a link: what it points to is replaced.
// On failure `path` is untouched and no temporary file stays. Refuses to replace anything that is
// not a regular file.
void write_file(const std::string& path, std::span<const std::string_view> parts);

[[noreturn]] void throw_io(const std::string& path, const std::string& what);

}  // namespace ehc
