// A tensor's elements as the bytes of a file.
#pragma once

#include <string>
#include <string_view>

#include "ehc/tensor.h"

namespace ehc {

// Bytes of a contiguous tensor of this shape. Precondition: they fit 64 bits.
inline size_t bytes_of(const Tensor& t) {
  return static_cast<size_t>(t.numel()) * size_of(t.dtype);
}

// The bytes of a tensor that can be written. Error{contract} names one that is absent, malformed,
// not contiguous, not in host memory, or BOOL with bytes other than 0 and 1.
[[nodiscard]] std::string_view writable_bytes(const std::string& name, const Tensor& tensor);

// Error{io} when a BOOL tensor that was read holds bytes other than 0 and 1: as a C++ bool such a
// byte is undefined. `name` describes the tensor in the text.
void check_booleans(const std::string& path, const std::string& name, const Tensor& tensor);

}  // namespace ehc
