// Times on a CUDA device, for `ehc bench` alone: here, so that the program needs no CUDA of its
// own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace ehc::cuda_timing {

// Bytes per second of the device's memory, over buffers far above its caches.
struct Rates {
  double copy = 0;            // read and written, the better of the runtime's copy and a kernel
  const char* copy_way = "";  // which of them
  double read = 0;            // read alone
  double one_to_four = 0;     // each element read once and written to four rows
};
Rates measure_rates(int index);

// Seconds per call, one entry for every replay of a graph of `calls` calls. `call(i)` enqueues the
// i-th on `stream`, which is none of the default streams. Replays for `seconds`, at least 7 times.
std::vector<double> time_graph(int index, void* stream, int64_t calls, double seconds,
                               const std::function<void(int64_t)>& call);

}  // namespace ehc::cuda_timing
