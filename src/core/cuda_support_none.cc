#include "core/cuda_graph.h"
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
void start_copy_to_device(int, void*, void*, const void*, size_t) { no_cuda(); }
void copy_to_device(int, void*, void*, const void*, size_t) { no_cuda(); }
void copy_to_host(int, void*, void*, const void*, size_t) { no_cuda(); }
void synchronize(int, void*) { no_cuda(); }
void copy_within_device(int, void*, void*, const void*, size_t) { no_cuda(); }
void count_differences(int, void*, const void*, const void*, size_t, void*, int64_t) { no_cuda(); }
void copy_floats(int, void*, const Tensor&, const Tensor*) { no_cuda(); }

}  // namespace ehc::cuda_support

namespace ehc::cuda_graph {

Stream::Stream(int) { cuda_support::no_cuda(); }
Graph::Graph(int index, void* stream, const std::function<void()>&)
    : index_(index), stream_(stream) {
  cuda_support::no_cuda();
}
void Graph::launch() const {}

}  // namespace ehc::cuda_graph

namespace ehc::cuda_timing {

Rates measure_rates(int) { cuda_support::no_cuda(); }
std::vector<double> time_graph(int, void*, int64_t, double, const std::function<void(int64_t)>&) {
  cuda_support::no_cuda();
}

}  // namespace ehc::cuda_timing
