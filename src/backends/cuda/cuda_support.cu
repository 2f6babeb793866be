#include "backends/cuda/launch.cuh"
#include "core/cuda_support.h"

namespace ehc::cuda_support {

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

bool is_built() { return true; }

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

// Memory of the host that is not pinned is copied aside before the call returns.
void start_copy_to_device(int index, void* stream, void* to, const void* from, size_t bytes) {
  const cuda::DeviceGuard guard(index);
  cuda::check("memory", cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice,
                                        static_cast<cudaStream_t>(stream)));
}

void copy_to_device(int index, void* stream, void* to, const void* from, size_t bytes) {
  start_copy_to_device(index, stream, to, from, bytes);
  synchronize(index, stream);
}

void copy_to_host(int index, void* stream, void* to, const void* from, size_t bytes) {
  const cuda::DeviceGuard guard(index);
  const auto on = static_cast<cudaStream_t>(stream);
  cuda::check("memory", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, on));
  cuda::check("memory", cudaStreamSynchronize(on));
}

void synchronize(int index, void* stream) {
  const cuda::DeviceGuard guard(index);
  cuda::check("stream", cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

void copy_within_device(int index, void* stream, void* to, const void* from, size_t bytes) {
  const cuda::DeviceGuard guard(index);
  cuda::check("memory", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice,
                                        static_cast<cudaStream_t>(stream)));
}

namespace {

constexpr int64_t kPiece = 16;

struct CountDifferences {
  const unsigned char* a;
  const unsigned char* b;
  int64_t bytes, pieces;  // of an area
  unsigned* different;

  __device__ void operator()(int64_t i) const {
    const int64_t begin = i % pieces * kPiece;
    const int64_t end = min(begin + kPiece, bytes);
    const unsigned char* of_a = a + i / pieces * bytes;
    bool same = true;
    const auto aligned =
        (reinterpret_cast<uintptr_t>(of_a) | reinterpret_cast<uintptr_t>(b)) % kPiece;
    if (aligned == 0 && end - begin == kPiece) {
      const uint4 x = *reinterpret_cast<const uint4*>(of_a + begin);
      const uint4 y = *reinterpret_cast<const uint4*>(b + begin);
      same = x.x == y.x && x.y == y.y && x.z == y.z && x.w == y.w;
    } else {
      for (int64_t k = begin; k < end; ++k) same = same && of_a[k] == b[k];
    }
    if (!same) atomicAdd(different, 1U);
  }
};

struct CopyFloats {
  Tensor to, from;

  __device__ void operator()(int64_t i) const {
    int64_t of_to = 0;
    int64_t of_from = 0;
    for (int k = to.rank - 1; k >= 0; --k) {
      const int64_t at = i % to.shape[k];
      of_to += at * to.stride[k];
      of_from += at * from.stride[k];
      i /= to.shape[k];
    }
    const bool is_copy = from.dtype != DType::none;
    static_cast<float*>(to.data)[of_to] = is_copy ? static_cast<float*>(from.data)[of_from] : 0.0f;
  }
};

}  // namespace

void copy_floats(int index, void* stream, const Tensor& to, const Tensor* from) {
  cuda::launch_each("copy", index, stream, to.numel(),
                    CopyFloats{to, from != nullptr ? *from : Tensor()});
}

void count_differences(int index, void* stream, const void* a, const void* b, size_t bytes,
                       void* different, int64_t times) {
  const int64_t pieces = (static_cast<int64_t>(bytes) + kPiece - 1) / kPiece;
  cuda::launch_each(
      "compare", index, stream, pieces * times,
      CountDifferences{static_cast<const unsigned char*>(a), static_cast<const unsigned char*>(b),
                       static_cast<int64_t>(bytes), pieces, static_cast<unsigned*>(different)});
}

}  // namespace ehc::cuda_support
