// Files as the table formats need them: aligned memory, bounded reads, atomic writes.
// Every failure is Error{io} whose one-line text starts with the path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "ehc/error.h"
#include "ehc/tensor.h"

namespace ehc {

inline constexpr size_t kDataAlignment = 64;

// Smallest multiple of kDataAlignment >= bytes.
constexpr uint64_t align_up(uint64_t bytes) {
  return (bytes + kDataAlignment - 1) / kDataAlignment * kDataAlignment;
}

// Uninitialised memory at a multiple of kDataAlignment; never null, even when empty.
class AlignedBuffer {
 public:
  explicit AlignedBuffer(uint64_t bytes);
  [[nodiscard]] std::byte* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
};

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

// The bytes of a tensor that can be written. Error{contract} names one that is absent, malformed,
// not contiguous, not in host memory, or BOOL with bytes other than 0 and 1.
[[nodiscard]] std::string_view writable_bytes(const std::string& name, const Tensor& tensor);

// Error{io} when a BOOL tensor that was read holds bytes other than 0 and 1: as a C++ bool such a
// byte is undefined. `name` describes the tensor in the text.
void check_booleans(const std::string& path, const std::string& name, const Tensor& tensor);

// `text` in quotes on one line: control and non-ASCII bytes escaped, cut after 80 bytes.
[[nodiscard]] std::string in_quotes(std::string_view text);

[[noreturn]] void throw_io(const std::string& path, const std::string& what);

}  // namespace ehc
