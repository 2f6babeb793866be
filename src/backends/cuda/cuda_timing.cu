#include <algorithm>

#include "backends/cuda/launch.cuh"
#include "core/cuda_graph.h"
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
  [[nodiscard]] uint4* packs() const { return static_cast<uint4*>(data); }
  int index;
  void* data;
};

// Seconds between two events around `work`, which is waited for.
template <class Work>
double seconds_of(cudaStream_t stream, const Event& start, const Event& stop, const Work& work) {
  cuda::check("event", cudaEventRecord(start.event, stream));
  work();
  cuda::check("event", cudaEventRecord(stop.event, stream));
  cuda::check("event", cudaEventSynchronize(stop.event));
  float milliseconds = 0;
  cuda::check("event", cudaEventElapsedTime(&milliseconds, start.event, stop.event));
  return milliseconds * 1e-3;
}

// --- the ceilings: as plain as kernels get, 16 bytes an access ---

constexpr int kThreads = 512;
constexpr int kReads = 8;  // of a thread, all in flight

__global__ void copy_kernel(const uint4* from, uint4* to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  to[i] = from[i];
}

__global__ void read_kernel(const uint4* from, uint4* to) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kReads + threadIdx.x;
  uint4 pack[kReads];
#pragma unroll
  for (int i = 0; i < kReads; ++i) pack[i] = from[first + i * kThreads];
  unsigned mixed = 0;
#pragma unroll
  for (int i = 0; i < kReads; ++i) mixed ^= pack[i].x ^ pack[i].y ^ pack[i].z ^ pack[i].w;
  if (mixed == 0x5eed5eedU) to[0] = pack[0];  // so that the reads are needed
}

// Rows of kThreads packs.
__global__ void one_to_four_kernel(const uint4* from, uint4* to) {
  const int64_t row = blockIdx.x;
  const uint4 pack = from[row * kThreads + threadIdx.x];
#pragma unroll
  for (int i = 0; i < 4; ++i) to[(row * 4 + i) * kThreads + threadIdx.x] = pack;
}

}  // namespace

Rates measure_rates(int index) {
  constexpr int64_t kBytes = int64_t{1} << 31;
  constexpr int64_t kBlocks = kBytes / 16 / kThreads;
  constexpr int kRepeats = 7;
  const cuda::DeviceGuard guard(index);
  const DeviceMemory from(index, kBytes);
  const DeviceMemory to(index, kBytes);
  cuda::check("memory", cudaMemset(from.data, 1, kBytes));
  const Event start;
  const Event stop;
  // The median of several runs.
  const auto rate = [&](double bytes, const auto& work) {
    double times[kRepeats];
    for (double& time : times) time = seconds_of(nullptr, start, stop, work);
    std::sort(times, times + kRepeats);
    return bytes / times[kRepeats / 2];
  };
  const auto kernel = [&](auto* body, int64_t blocks) {
    return [&, body, blocks] {
      cuda::launch("ceiling", index, nullptr, body, dim3(cuda::blocks(blocks)), dim3(kThreads), 0,
                   from.packs(), to.packs());
    };
  };
  Rates rates;
  rates.copy = rate(2.0 * kBytes, [&] {
    cuda::check("copy", cudaMemcpyAsync(to.data, from.data, kBytes, cudaMemcpyDeviceToDevice));
  });
  rates.copy_way = "cudaMemcpyAsync";
  const double by_kernel = rate(2.0 * kBytes, kernel(&copy_kernel, kBlocks));
  if (by_kernel > rates.copy) {
    rates.copy = by_kernel;
    rates.copy_way = "kernel";
  }
  rates.read = rate(kBytes, kernel(&read_kernel, kBlocks / kReads));
  rates.one_to_four = rate(1.25 * kBytes, kernel(&one_to_four_kernel, kBlocks / 4));
  return rates;
}

std::vector<double> time_graph(int index, void* stream, int64_t calls, double seconds,
                               const std::function<void(int64_t)>& call) {
  constexpr size_t kLeast = 7;
  const cuda::DeviceGuard guard(index);
  const auto on = static_cast<cudaStream_t>(stream);
  call(0);  // loads the kernels
  cuda::check("graph", cudaStreamSynchronize(on));
  const cuda_graph::Graph graph(index, stream, [&] {
    for (int64_t i = 0; i < calls; ++i) call(i);
  });
  const auto replay = [&] { graph.launch(); };
  const Event start;
  const Event stop;
  std::vector<double> times;
  double total = seconds_of(on, start, stop, replay);  // the first warms up
  while (times.size() < kLeast || total < seconds) {
    const double taken = seconds_of(on, start, stop, replay);
    total += taken;
    times.push_back(taken / static_cast<double>(calls));
  }
  return times;
}

}  // namespace ehc::cuda_timing
