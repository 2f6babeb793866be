#include <algorithm>

#include "backends/cuda/launch.cuh"
#include "core/cuda_support.h"
#include "core/cuda_timing.h"

namespace ehc::cuda_timing {

namespace {

struct Event {
  Event() { cuda::check("event", cudaEventCreate(&event)); }
  ~Event() { cudaEventDestroy(event); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t event = nullptr;
};

struct DeviceMemory {
  DeviceMemory(int device, size_t bytes)
      : index(device), data(cuda_support::allocate(device, bytes)) {}
  ~DeviceMemory() { cuda_support::release(index, data); }
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

}  // namespace ehc::cuda_timing
