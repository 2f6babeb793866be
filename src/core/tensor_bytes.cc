#include "core/tensor_bytes.h"

#include <algorithm>

#include "core/file_io.h"
#include "core/text.h"

namespace ehc {

namespace {

// The first byte of a BOOL tensor that is neither 0 nor 1; the end when there is none.
std::string_view::const_iterator first_bad_boolean(std::string_view bytes) {
  return std::find_if(bytes.begin(), bytes.end(),
                      [](char byte) { return static_cast<unsigned char>(byte) > 1; });
}

}  // namespace

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

}  // namespace ehc
