#include "text/file_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "ehc/error.h"

namespace ehc::text {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw Error(ErrorKind::io, path + ": " + what);
}

[[noreturn]] void fail_with_errno(const std::string& path, const char* action, int error) {
  fail(path, std::string("cannot ") + action + ": " + std::generic_category().message(error));
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  [[nodiscard]] int get() const { return fd_; }
  // Some file systems report a failed write only here.
  [[nodiscard]] bool close() {
    const int fd = fd_;
    fd_ = -1;
    return ::close(fd) == 0;
  }

 private:
  int fd_;
};

// Returns 0 or the error number.
int write_all(int fd, std::string_view contents) {
  while (!contents.empty()) {
    const ssize_t written = ::write(fd, contents.data(), contents.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    contents.remove_prefix(static_cast<size_t>(written));
  }
  return 0;
}

}  // namespace

std::string read_file(const std::string& path, size_t max_bytes) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) fail_with_errno(path, "open", errno);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) fail_with_errno(path, "read", errno);
  std::string contents;
  size_t used = 0;
  // One byte more than the size lets the end of a regular file show in the first pass.
  if (status.st_size > 0 && static_cast<uint64_t>(status.st_size) <= max_bytes) {
    contents.resize(static_cast<size_t>(status.st_size) + 1);
  }
  for (;;) {
    if (used == contents.size()) contents.resize(used + (size_t{1} << 16));
    const ssize_t got = ::read(file.get(), contents.data() + used, contents.size() - used);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_with_errno(path, "read", errno);
    if (got == 0) break;
    used += static_cast<size_t>(got);
    if (used > max_bytes) fail(path, "larger than " + std::to_string(max_bytes) + " bytes");
  }
  contents.resize(used);
  return contents;
}

void write_file_atomically(const std::string& path, std::string_view contents) {
  // A link stays a link: what it points to is replaced.
  std::error_code ignored;
  const std::filesystem::path resolved = std::filesystem::canonical(path, ignored);
  const std::string target = ignored ? path : resolved.string();
  struct stat status {};
  if (::stat(target.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    fail(path, "cannot write: not a regular file");
  }

  static std::atomic<unsigned> counter{0};
  const std::string temporary =
      target + ".tmp." + std::to_string(::getpid()) + "." + std::to_string(counter++);
  FileDescriptor file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (file.get() < 0) fail_with_errno(path, "write", errno);
  int error = write_all(file.get(), contents);
  if (error == 0 && ::fsync(file.get()) != 0) error = errno;
  if (!file.close() && error == 0) error = errno;
  if (error == 0 && std::rename(temporary.c_str(), target.c_str()) != 0) error = errno;
  if (error != 0) {
    ::unlink(temporary.c_str());
    fail_with_errno(path, "write", error);
  }
}

}  // namespace ehc::text
