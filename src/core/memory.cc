#include "ehc/memory.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "core/cuda_support.h"
#include "ehc/error.h"

namespace ehc {

Buffer::Buffer(const Context& context, size_t bytes)
    : bytes_(bytes),
      device_(context.device()),
      device_index_(context.device_index()),
      stream_(context.stream()) {
  if (bytes == 0) return;
  if (device_ == Device::cuda) {
    data_ = cuda_support::allocate(device_index_, bytes);
    return;
  }
  constexpr size_t kAlignment = 64;
  if (bytes <= SIZE_MAX - kAlignment) {
    data_ = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  }
  if (data_ == nullptr) {
    throw Error(ErrorKind::internal, "memory: cannot allocate " + std::to_string(bytes) + " bytes");
  }
}

Buffer::~Buffer() {
  if (device_ == Device::cuda) {
    cuda_support::release(device_index_, data_);
  } else {
    std::free(data_);
  }
}

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
  std::swap(device_index_, other.device_index_);
  std::swap(stream_, other.stream_);
  return *this;
}

void Buffer::upload(const void* host) {
  if (bytes_ == 0) return;
  if (device_ == Device::cuda) {
    cuda_support::copy_to_device(device_index_, stream_, data_, host, bytes_);
  } else {
    std::memcpy(data_, host, bytes_);
  }
}

void Buffer::download(void* host) const {
  if (bytes_ == 0) return;
  if (device_ == Device::cuda) {
    cuda_support::copy_to_host(device_index_, stream_, host, data_, bytes_);
  } else {
    std::memcpy(host, data_, bytes_);
  }
}

void synchronize(const Context& context) {
  if (context.device() == Device::cuda) {
    cuda_support::synchronize(context.device_index(), context.stream());
  }
}

}  // namespace ehc
