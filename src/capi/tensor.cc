#include "capi/tensor.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "core/bind.h"

namespace ehc::capi {

// DLPack's ABI, which callers cast from.
static_assert(sizeof(ehc_tensor) == 48 && offsetof(ehc_tensor, device) == 8 &&
              offsetof(ehc_tensor, ndim) == 16 && offsetof(ehc_tensor, dtype) == 20 &&
              offsetof(ehc_tensor, shape) == 24 && offsetof(ehc_tensor, strides) == 32 &&
              offsetof(ehc_tensor, byte_offset) == 40);
static_assert(sizeof(ehc_dtype) == 4 && offsetof(ehc_dtype, bits) == 1 &&
              offsetof(ehc_dtype, lanes) == 2);
static_assert(EHC_MAX_RANK == kMaxRank);

const ehc_dtype kDTypes[kDTypeCount] = {
    {0, 0, 0},   // none
    {2, 32, 1},  // f32
    {2, 16, 1},  // f16
    {4, 16, 1},  // bf16
    {10, 8, 1},  // f8_e4m3
    {14, 8, 1},  // f8_e8m0
    {0, 64, 1},  // i64
    {0, 32, 1},  // i32
    {1, 8, 1},   // u8
    {6, 8, 1},   // boolean
};

namespace {

DType to_dtype(ehc_dtype dtype, const Schema& op, std::string_view name) {
  for (int i = 1; i < kDTypeCount; ++i) {
    const ehc_dtype& known = kDTypes[i];
    if (dtype.code == known.code && dtype.bits == known.bits && dtype.lanes == 1) {
      return static_cast<DType>(i);
    }
  }
  fail_tensor(op, name, "an element type of ehc_tensor with 1 lane",
              "code " + std::to_string(dtype.code) + ", " + std::to_string(dtype.bits) + " bits, " +
                  std::to_string(dtype.lanes) + " lanes");
}

void set_device(Tensor& out, ehc_device device, const Schema& op, std::string_view name) {
  if (device.type == EHC_HOST || device.type == EHC_CUDA_HOST) return;
  if (device.type != EHC_CUDA || device.id < 0 || device.id > INT8_MAX) {
    fail_tensor(op, name, "memory of device type 1 (host), 2 (CUDA) or 3 (pinned host)",
                "device type " + std::to_string(device.type) + ", id " + std::to_string(device.id));
  }
  out.device = Device::cuda;
  out.device_index = static_cast<int8_t>(device.id);
}

void* first_element(const ehc_tensor& tensor, const Schema& op, std::string_view name) {
  if (tensor.data == nullptr) return nullptr;
  uintptr_t address = 0;
  if (__builtin_add_overflow(reinterpret_cast<uintptr_t>(tensor.data), tensor.byte_offset,
                             &address)) {
    fail_tensor(op, name, "data + byte_offset within the address space",
                "byte_offset " + std::to_string(tensor.byte_offset));
  }
  return reinterpret_cast<void*>(address);
}

}  // namespace

Tensor to_tensor(const ehc_tensor& tensor, const Schema& op, std::string_view name) {
  if (tensor.ndim < 0 || tensor.ndim > kMaxRank) {
    fail_tensor(op, name, "0..8 dimensions", std::to_string(tensor.ndim));
  }
  if (tensor.ndim > 0 && tensor.shape == nullptr) {
    fail_tensor(op, name, "a pointer to the shape", "null");
  }
  Tensor out(first_element(tensor, op, name), to_dtype(tensor.dtype, op, name), tensor.shape,
             tensor.ndim);
  set_device(out, tensor.device, op, name);
  if (tensor.strides != nullptr) std::copy_n(tensor.strides, tensor.ndim, out.stride);
  return out;
}

ehc_layout to_layout(const Tensor& tensor) {
  ehc_layout out{};
  out.dtype = kDTypes[static_cast<size_t>(tensor.dtype)];
  out.ndim = tensor.rank;
  std::copy_n(tensor.shape, tensor.rank, out.shape);
  return out;
}

}  // namespace ehc::capi
