#include "core/cuda_support.h"
#include "core/cuda_timing.h"
#include "ehc/error.h"

namespace ehc::cuda_support {

namespace {
[[noreturn]] void no_cuda() {
  throw Error(ErrorKind::unavailable,
              "device 'cuda': this build has no CUDA; build with nvcc on PATH to get it");
}
}  // namespace

bool is_built() { return false; }
void require_device(int) { no_cuda(); }
std::string describe_device(int) { no_cuda(); }
int device_count() { return 0; }
void* allocate(int, size_t) { no_cuda(); }
void release(int, void*) noexcept {}
void copy_to_device(int, void*, void*, const void*, size_t) { no_cuda(); }
void copy_to_host(int, void*, void*, const void*, size_t) { no_cuda(); }
void synchronize(int, void*) { no_cuda(); }

}  // namespace ehc::cuda_support

namespace ehc::cuda_timing {

double time_copy(int, size_t) { cuda_support::no_cuda(); }
double time_on_stream(int, void*, const std::function<void()>&) { cuda_support::no_cuda(); }

}  // namespace ehc::cuda_timing
