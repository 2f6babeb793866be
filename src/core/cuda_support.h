// What the rest of the library asks of CUDA. A build without nvcc has the same functions, which
// answer Error{unavailable}.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ehc/tensor.h"

namespace ehc::cuda_support {

bool is_built();
// Throws Error{unavailable} unless the build has CUDA and device `index` is there.
void require_device(int index);
// Name and compute capability, e.g. "NVIDIA H200, sm_90"; throws like require_device.
std::string describe_device(int index);
int device_count();  // 0 without CUDA

void* allocate(int index, size_t bytes);
void release(int index, void* data) noexcept;
// On `stream`, behind what is there; return when `from` may change, which may be sooner than done.
void start_copy_to_device(int index, void* stream, void* to, const void* from, size_t bytes);
// The same; return when done.
void copy_to_device(int index, void* stream, void* to, const void* from, size_t bytes);
void copy_to_host(int index, void* stream, void* to, const void* from, size_t bytes);
void synchronize(int index, void* stream);
// On `stream` without waiting: a copy within the device, and a count in *different (unsigned, on
// the device) of the 16-byte pieces in which `times` areas, one behind the other from `a` on,
// differ from the one at `b`.
void copy_within_device(int index, void* stream, void* to, const void* from, size_t bytes);
void count_differences(int index, void* stream, const void* a, const void* b, size_t bytes,
                       void* different, int64_t times = 1);

// The elements of `from`, or zeros without one; F32 of one shape, whatever the strides.
void copy_floats(int index, void* stream, const Tensor& to, const Tensor* from);

}  // namespace ehc::cuda_support
