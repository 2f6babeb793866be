// Times on a CUDA device, for `ehc bench` alone: here, so that the program needs no CUDA of its
// own.
#pragma once

#include <cstddef>
#include <functional>

namespace ehc::cuda_timing {

// A whole-device copy of `bytes` bytes, repeated: seconds of the best one (for ceilings).
double time_copy(int index, size_t bytes);
// Seconds that what `work` enqueues on `stream` takes there; waits for it.
double time_on_stream(int index, void* stream, const std::function<void()>& work);

}  // namespace ehc::cuda_timing
