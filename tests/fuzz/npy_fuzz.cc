// Any bytes: the npy reader refuses them with Error{io} or gives a tensor whose bytes are all
// there.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "core/tensor_bytes.h"
#include "ehc/error.h"
#include "tables/npy.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto array = ehc::tables::parse_npy({reinterpret_cast<const char*>(data), size}, "fuzz");
    const auto bytes = ehc::writable_bytes("fuzz", array.tensor);
    if (bytes.size() > size) std::abort();
    // Read every byte under the sanitizer's eyes.
    unsigned sum = 0;
    for (const char byte : bytes) sum += static_cast<unsigned char>(byte);
    if (sum > bytes.size() * 255) std::abort();
  } catch (const ehc::Error& error) {
    if (error.kind() != ehc::ErrorKind::io) std::abort();
  }
  return 0;
}
