// Launches with more shared memory than every kernel may have.
#pragma once

#include "backends/cuda/launch.cuh"

namespace ehc::cuda {

// The most that a block may ask for.
inline size_t most_shared_bytes(const char* name, int device) {
  int bytes = 0;
  check(name, cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return static_cast<size_t>(bytes);
}

template <class... Params, class... Values>
void launch_large(const char* name, int device, void* stream, void (*kernel)(Params...), dim3 grid,
                  dim3 block, size_t shared_bytes, Values... values) {
  const DeviceGuard guard(device);
  check(name, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(shared_bytes)));
  launch(name, device, stream, kernel, grid, block, shared_bytes, values...);
}

}  // namespace ehc::cuda
