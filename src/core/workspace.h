// Cutting a caller's workspace into arrays.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ehc {

// Hands out arrays that start on 64-byte borders. Over a null base it only adds up, so that one
// function says both how much an operator needs and where its arrays are.
class Workspace {
 public:
  explicit Workspace(void* base) : base_(static_cast<char*>(base)) {
    used_ = (kBorder - reinterpret_cast<uintptr_t>(base) % kBorder) % kBorder;
  }

  template <class T>
  T* take(int64_t count) {
    char* at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kBorder - 1) / kBorder * kBorder;
    return reinterpret_cast<T*>(at);
  }
  // What was taken, with room to move the first array to a border.
  [[nodiscard]] size_t bytes() const { return used_ == 0 ? 0 : used_ + kBorder; }

 private:
  static constexpr size_t kBorder = 64;
  char* base_;
  size_t used_;
};

}  // namespace ehc
