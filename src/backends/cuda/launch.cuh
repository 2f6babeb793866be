// The one way to launch a kernel: on the context's device and stream, with errors that name the
// operator.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "ehc/error.h"

namespace ehc::cuda {

inline void check(const char* what, cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // a launch error is sticky until read
  throw Error(ErrorKind::internal, std::string(what) + ": CUDA: " + cudaGetErrorString(status));
}

// Makes a device current and restores the caller's on the way out.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check("device", cudaGetDevice(&previous_));
    if (device != previous_) check("device", cudaSetDevice(device));
  }
  ~DeviceGuard() { cudaSetDevice(previous_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

// Grid extent in x, checked against the limit of the hardware.
inline unsigned blocks(int64_t count) {
  if (count > INT32_MAX) {
    throw Error(ErrorKind::contract,
                "cuda: grid: expected at most 2147483647 blocks, got " + std::to_string(count));
  }
  return static_cast<unsigned>(count);
}

template <class... Params, class... Values>
void launch(const char* name, int device, void* stream, void (*kernel)(Params...), dim3 grid,
            dim3 block, size_t shared_bytes, Values... values) {
  const DeviceGuard guard(device);
  kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(
      static_cast<Params>(values)...);
  check(name, cudaGetLastError());
}

}  // namespace ehc::cuda
