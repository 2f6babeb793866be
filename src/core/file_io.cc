#include "core/file_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <system_error>

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

// The first byte of a BOOL tensor that is neither 0 nor 1; the end when there is none.
std::string_view::const_iterator first_bad_boolean(std::string_view bytes) {
  return std::find_if(bytes.begin(), bytes.end(),
                      [](char byte) { return static_cast<unsigned char>(byte) > 1; });
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

AlignedBuffer::AlignedBuffer(uint64_t bytes) {
  const uint64_t padded = align_up(std::max<uint64_t>(bytes, 1));
  if (padded >= bytes && padded <= uint64_t{PTRDIFF_MAX}) {
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(kDataAlignment, padded)));
  }
  if (!data_) {
    throw Error(ErrorKind::internal, "memory: cannot allocate " + std::to_string(bytes) + " bytes");
  }
}

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

std::string_view writable_bytes(const std::string& name, const Tensor& tensor) {
  const auto fail = [&](const char* what) {
    throw Error(ErrorKind::contract, "tensor " + in_quotes(name) + ": " + what);
  };
  if (!tensor.present()) fail("expected a tensor, got an absent one");
  if (tensor.rank < 0 || tensor.rank > kMaxRank) fail("expected at most 8 dimensions");
  if (std::any_of(tensor.shape, tensor.shape + tensor.rank, [](int64_t n) { return n < 0; })) {
    fail("expected dimensions >= 0");
  }
  if (tensor.device != Device::cpu) fail("expected host memory");
  const int64_t count = tensor.numel();  // INT64_MAX when it overflows
  int64_t size = 0;
  if (count == INT64_MAX ||
      __builtin_mul_overflow(count, static_cast<int64_t>(size_of(tensor.dtype)), &size)) {
    fail("size overflows 64 bits");
  }
  if (count > 0 && !tensor.contiguous()) fail("expected contiguous elements");
  if (size > 0 && tensor.data == nullptr) fail("expected data, got null");
  const std::string_view bytes(static_cast<const char*>(tensor.data), static_cast<size_t>(size));
  if (tensor.dtype == DType::boolean && first_bad_boolean(bytes) != bytes.end()) {
    fail("expected BOOL bytes 0 and 1");
  }
  return bytes;
}

void check_booleans(const std::string& path, const std::string& name, const Tensor& tensor) {
  if (tensor.dtype != DType::boolean) return;
  const std::string_view bytes(static_cast<const char*>(tensor.data),
                               static_cast<size_t>(tensor.numel()));
  const auto* bad = first_bad_boolean(bytes);
  if (bad == bytes.end()) return;
  throw_io(path, name + ": expected BOOL bytes 0 and 1, got " +
                     std::to_string(static_cast<unsigned char>(*bad)) + " at position " +
                     std::to_string(bad - bytes.begin()));
}

std::string in_quotes(std::string_view text) {
  constexpr size_t kLongest = 80;
  constexpr char kHex[] = "0123456789abcdef";
  std::string result = "'";
  for (const char c : text.substr(0, kLongest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f) {
      result += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    } else {
      result += c;
    }
  }
  if (text.size() > kLongest) result += "...";
  return result + "'";
}

void throw_io(const std::string& path, const std::string& what) {
  throw Error(ErrorKind::io, path + ": " + what);
}

}  // namespace ehc
