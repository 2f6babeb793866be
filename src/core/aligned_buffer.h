// Host memory for what files hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

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

}  // namespace ehc
