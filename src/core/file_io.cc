#include "core/file_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "core/text.h"

namespace ehc {
namespace {

constexpr uint64_t kLargestTransfer = uint64_t{1} << 30;

[[noreturn]] void throw_errno(const std::string& path, const std::string& action, int error) {
  throw_io(path, action + ": " + std::generic_category().message(error));
}

// A path with a NUL byte would silently name another file.
void check_path(const std::string& path) {
  if (path.empty() || path.find('\0') != std::string::npos) {
    throw_io(in_quotes(path), "not a file name");
  }
}

// A new file beside the target that disappears unless it was renamed.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& target) : target_(target) {
    static std::atomic<unsigned> counter{0};
    const std::string stem = folder() + ".ehc-" + std::to_string(::getpid()) + "-";
    do {
      path_ = stem + std::to_string(counter++) + ".tmp";
      descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    } while (descriptor_ < 0 && errno == EEXIST);
    if (descriptor_ < 0) throw_errno(target_, "cannot write", errno);
  }
  ~TemporaryFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void write(std::string_view part) {
    while (!part.empty()) {
      const size_t wanted = std::min<uint64_t>(part.size(), kLargestTransfer);
      const ssize_t written = ::write(descriptor_, part.data(), wanted);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) throw_errno(target_, "cannot write", errno);
      part.remove_prefix(static_cast<size_t>(written));
    }
  }

  void rename_to_target() {
    if (::fsync(descriptor_) != 0) throw_errno(target_, "cannot write", errno);
    const int closed = ::close(descriptor_);
    descriptor_ = -1;
    if (closed != 0) throw_errno(target_, "cannot write", errno);
    if (::rename(path_.c_str(), target_.c_str()) != 0) {
      throw_errno(target_, "cannot write", errno);
    }
    path_.clear();
    sync_folder();
  }

 private:
  [[nodiscard]] std::string folder() const {
    const size_t slash = target_.rfind('/');
    return slash == std::string::npos ? "" : target_.substr(0, slash + 1);
  }

  // Makes the rename durable. The file is complete either way, so a file system that cannot sync
  // folders is no error.
  void sync_folder() const {
    const std::string name = folder();
    const int folder_descriptor =
        ::open(name.empty() ? "." : name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder_descriptor < 0) return;
    ::fsync(folder_descriptor);
    ::close(folder_descriptor);
  }

  std::string target_;
  std::string path_;
  int descriptor_ = -1;
};

}  // namespace

InputFile::InputFile(const std::string& path) : path_(path) {
  check_path(path);
  // O_NONBLOCK: opening a pipe without a writer would wait forever.
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) throw_errno(path, "cannot read", errno);
  struct stat status {};
  const int failed = ::fstat(descriptor_, &status) != 0 ? errno : 0;
  if (failed != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor_);
    if (failed != 0) throw_errno(path, "cannot read", failed);
    throw_io(path, "cannot read: not a regular file");
  }
  size_ = static_cast<uint64_t>(status.st_size);
}

InputFile::~InputFile() { ::close(descriptor_); }

void InputFile::read(uint64_t offset, void* data, uint64_t bytes) const {
  auto* target = static_cast<char*>(data);
  while (bytes > 0) {
    const size_t wanted = std::min(bytes, kLargestTransfer);
    const ssize_t got = ::pread(descriptor_, target, wanted, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno(path_, "cannot read", errno);
    if (got == 0) throw_io(path_, "cannot read: the file was shortened meanwhile");
    target += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
}

std::string read_file(const std::string& path, uint64_t max_bytes) {
  const InputFile file(path);
  if (file.size() > max_bytes)
    throw_io(path, "larger than " + std::to_string(max_bytes) + " bytes");
  std::string contents(file.size(), '\0');
  file.read(0, contents.data(), contents.size());
  return contents;
}

void write_file(const std::string& path, std::span<const std::string_view> parts) {
  check_path(path);
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw_io(path, "cannot write: not a regular file");
  }
  std::error_code missing;
  const std::filesystem::path resolved = std::filesystem::canonical(path, missing);
  TemporaryFile file(missing ? path : resolved.string());
  for (const std::string_view part : parts) file.write(part);
  file.rename_to_target();
}

void throw_io(const std::string& path, const std::string& what) {
  throw Error(ErrorKind::io, path + ": " + what);
}

}  // namespace ehc
