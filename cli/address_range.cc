#include "cli/address_range.h"

#include <sys/mman.h>

#include <string>
#include <utility>

#include "ehc/error.h"

namespace ehc::cli {

AddressRange::AddressRange(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* data = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    throw Error(ErrorKind::internal,
                "memory: no " + std::to_string(bytes) + " bytes of addresses are left");
  }
  data_ = data;
}

AddressRange::~AddressRange() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

AddressRange::AddressRange(AddressRange&& other) noexcept { *this = std::move(other); }

AddressRange& AddressRange::operator=(AddressRange&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace ehc::cli
