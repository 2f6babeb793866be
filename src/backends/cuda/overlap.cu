// Whether kernels may start while the one before them ends; see launch.cuh.
#include <array>
#include <atomic>

#include "backends/cuda/launch.cuh"

namespace ehc::cuda {

namespace {

// Compiled for the same architectures as all kernels.
__global__ void probe() {}

enum class Overlap : int { unknown, no, yes };

Overlap ask(int device) {
  const DeviceGuard guard(device);
  cudaFuncAttributes attributes{};
  check("device", cudaFuncGetAttributes(&attributes, probe));
  constexpr int kFirst = 90;  // what wait_for_previous asks of __CUDA_ARCH__
  return attributes.ptxVersion >= kFirst ? Overlap::yes : Overlap::no;
}

}  // namespace

bool can_overlap(int device) {
  constexpr size_t kDevices = 64;
  static std::array<std::atomic<Overlap>, kDevices> known{};
  const auto index = static_cast<size_t>(device);
  if (index >= kDevices) return false;
  Overlap overlap = known[index].load(std::memory_order_relaxed);
  if (overlap == Overlap::unknown) {
    overlap = ask(device);
    known[index].store(overlap, std::memory_order_relaxed);
  }
  return overlap == Overlap::yes;
}

}  // namespace ehc::cuda
