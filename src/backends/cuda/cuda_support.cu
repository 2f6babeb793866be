#include <algorithm>

#include "backends/cuda/launch.cuh"
#include "core/cuda_support.h"

namespace ehc::cuda_support {

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

void require_device(int index) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    throw Error(ErrorKind::unavailable,
                std::string("device 'cuda': ") + cudaGetErrorString(status));
  }
  if (index < 0 || index >= count) {
    throw Error(ErrorKind::unavailable, "device 'cuda': expected an index below " +
                                            std::to_string(count) + ", got " +
                                            std::to_string(index));
  }
}

std::string describe_device(int index) {
  require_device(index);
  cudaDeviceProp properties{};
  cuda::check("device", cudaGetDeviceProperties(&properties, index));
  return std::string(properties.name) + ", sm_" + std::to_string(properties.major) +
         std::to_string(properties.minor) + ", " + std::to_string(properties.multiProcessorCount) +
         " SMs, " + std::to_string(properties.totalGlobalMem >> 30) + " GiB";
}

void* allocate(int index, size_t bytes) {
  const cuda::DeviceGuard guard(index);
  void* data = nullptr;
  cuda::check("memory", cudaMalloc(&data, bytes));
  return data;
}

void release(int index, void* data) noexcept {
  if (data == nullptr) return;
  int previous = 0;
  if (cudaGetDevice(&previous) != cudaSuccess) return;
  cudaSetDevice(index);
  cudaFree(data);
  cudaSetDevice(previous);
}

void copy_to_device(int index, void* to, const void* from, size_t bytes) {
  const cuda::DeviceGuard guard(index);
  cuda::check("memory", cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
}

void copy_to_host(int index, void* to, const void* from, size_t bytes) {
  const cuda::DeviceGuard guard(index);
  cuda::check("memory", cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}

void synchronize(int index, void* stream) {
  const cuda::DeviceGuard guard(index);
  cuda::check("stream", cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

namespace {

struct Event {
  Event() { cuda::check("event", cudaEventCreate(&event)); }
  ~Event() { cudaEventDestroy(event); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t event = nullptr;
};

struct DeviceMemory {
  DeviceMemory(int device, size_t bytes) : index(device), data(allocate(device, bytes)) {}
  ~DeviceMemory() { release(index, data); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  int index;
  void* data;
};

}  // namespace

double time_copy(int index, size_t bytes) {
  const cuda::DeviceGuard guard(index);
  const DeviceMemory from(index, bytes);
  const DeviceMemory to(index, bytes);
  Event start;
  Event stop;
  float best = 1e30F;
  for (int repeat = 0; repeat < 12; ++repeat) {
    cuda::check("event", cudaEventRecord(start.event));
    cuda::check("copy", cudaMemcpyAsync(to.data, from.data, bytes, cudaMemcpyDeviceToDevice));
    cuda::check("event", cudaEventRecord(stop.event));
    cuda::check("event", cudaEventSynchronize(stop.event));
    float milliseconds = 0;
    cuda::check("event", cudaEventElapsedTime(&milliseconds, start.event, stop.event));
    if (repeat >= 2) best = std::min(best, milliseconds);
  }
  return best * 1e-3;
}

double time_on_stream(int index, void* stream, const std::function<void()>& work) {
  const cuda::DeviceGuard guard(index);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  Event start;
  Event stop;
  cuda::check("event", cudaEventRecord(start.event, cuda_stream));
  work();
  cuda::check("event", cudaEventRecord(stop.event, cuda_stream));
  cuda::check("event", cudaEventSynchronize(stop.event));
  float milliseconds = 0;
  cuda::check("event", cudaEventElapsedTime(&milliseconds, start.event, stop.event));
  return milliseconds * 1e-3;
}

}  // namespace ehc::cuda_support
