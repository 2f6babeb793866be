// Tensor: a view of memory that the caller owns. Copying it copies the view.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "ehc/dtype.h"
#include "ehc/export.h"

namespace ehc {

enum class Device : uint8_t { cpu, cuda };

inline constexpr int kMaxRank = 8;

// Strides are in elements and may be anything that does not alias elements of an output; the last
// dimension of every operator argument must have stride 1. A default-constructed tensor is absent:
// absence is the dtype `none`, never a null pointer (an empty tensor may have one).
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::none;
  Device device = Device::cpu;
  int8_t device_index = 0;
  int8_t rank = 0;
  int64_t shape[kMaxRank] = {};
  int64_t stride[kMaxRank] = {};

  Tensor() = default;
  // Row-major view of `shape`. A read-only input may be given as const.
  EHC_API Tensor(const void* data, DType dtype, std::initializer_list<int64_t> shape,
                 Device device = Device::cpu, int device_index = 0);
  EHC_API Tensor(const void* data, DType dtype, const int64_t* shape, int rank,
                 Device device = Device::cpu, int device_index = 0);

  [[nodiscard]] bool present() const { return dtype != DType::none; }
  explicit operator bool() const { return present(); }
  // Product of the dimensions; 1 for rank 0.
  [[nodiscard]] EHC_API int64_t numel() const;
  [[nodiscard]] EHC_API bool contiguous() const;
  // View of rows [begin, end) along axis `axis`. Preconditions: 0 <= begin <= end <= shape[axis].
  [[nodiscard]] EHC_API Tensor slice(int axis, int64_t begin, int64_t end) const;
  // View of one index along `axis`, which disappears.
  [[nodiscard]] EHC_API Tensor select(int axis, int64_t index) const;

  template <class T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(data);
  }
};

}  // namespace ehc
