// Memory for callers that have no allocator of their own.
#pragma once

#include <cstddef>

#include "ehc/context.h"
#include "ehc/export.h"

namespace ehc {

// Owns `bytes` bytes on the device of a context, aligned to 256 bytes (host: 64). Copies run on the
// context's stream, behind what was enqueued there before, so a download sees what operators of the
// same stream wrote. The stream must live as long as the buffer is copied; releasing the memory
// waits for the device.
class EHC_API Buffer {
 public:
  Buffer() = default;
  // Throws Error{internal} when memory runs out.
  Buffer(const Context& context, size_t bytes);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }
  // Copies all bytes from or to host memory and waits for it. Throws Error{internal} when the
  // driver fails, which may be for work that was enqueued before.
  void upload(const void* host);
  void download(void* host) const;

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  Device device_ = Device::cpu;
  int device_index_ = 0;
  void* stream_ = nullptr;
};

// Waits until everything enqueued on the context's stream is done; nothing to do on the CPU.
EHC_API void synchronize(const Context& context);

}  // namespace ehc
