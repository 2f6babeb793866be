// Addresses without memory: for tensors that are looked at but never read.
#pragma once

#include <cstddef>

namespace ehc::cli {

// So many bytes of addresses that nothing else has; any access is a fault. Host only.
class AddressRange {
 public:
  explicit AddressRange(size_t bytes);
  ~AddressRange();
  AddressRange(AddressRange&& other) noexcept;
  AddressRange& operator=(AddressRange&& other) noexcept;
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  [[nodiscard]] void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace ehc::cli
