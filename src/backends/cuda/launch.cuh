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

// --- kernels that start while the one before them ends (programmatic dependent launch) ---

// The first statement of such a kernel, before it reads or writes memory of others.
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Does wait_for_previous wait in the code that this device runs?
bool can_overlap(int device);

// Saves the time that a launch takes; no result depends on it. Only small grids overlap: those that
// wait must not take the place of blocks of a kernel that still works.
template <class... Params, class... Values>
void launch_overlapping(const char* name, int device, void* stream, void (*kernel)(Params...),
                        dim3 grid, dim3 block, size_t shared_bytes, Values... values) {
  constexpr int64_t kMostThreads = 1 << 15;
  const int64_t threads = int64_t{grid.x} * grid.y * block.x * block.y;
  if (threads > kMostThreads || !can_overlap(device)) {
    return launch(name, device, stream, kernel, grid, block, shared_bytes, values...);
  }
  const DeviceGuard guard(device);
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &overlap;
  config.numAttrs = 1;
  check(name, cudaLaunchKernelEx(&config, kernel, static_cast<Params>(values)...));
}

// One thread for every i in [0, count): calls body(i).
template <class Body>
__global__ void each_kernel(const __grid_constant__ Body body, int64_t count) {
  wait_for_previous();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) body(i);
}

// Blocks are small, so that few indices with long work still spread over the device.
template <class Body>
void launch_each(const char* name, int device, void* stream, int64_t count, const Body& body) {
  constexpr int kThreads = 64;
  if (count == 0) return;
  launch_overlapping(name, device, stream, each_kernel<Body>,
                     dim3(blocks((count + kThreads - 1) / kThreads)), dim3(kThreads), 0, body,
                     count);
}

}  // namespace ehc::cuda
