// Work that is captured instead of run, for checks and times. Here, so that the program needs no
// CUDA of its own.
#pragma once

#include <functional>
#include <memory>

namespace ehc::cuda_graph {

// A stream of the device that is none of the default streams, so that work on it can be captured.
class Stream {
 public:
  explicit Stream(int index);
  [[nodiscard]] void* get() const { return stream_.get(); }

 private:
  std::shared_ptr<void> stream_;
};

// What `work` enqueues on `stream`, as a graph. Throws Error{internal} where it cannot be captured:
// when it allocates, synchronises or uses another stream that did not join, or when the graph has
// anything but kernels, copies and fills.
class Graph {
 public:
  Graph(int index, void* stream, const std::function<void()>& work);
  // Enqueues a replay.
  void launch() const;

 private:
  [[maybe_unused]] int index_;  // in a build without CUDA
  [[maybe_unused]] void* stream_;
  std::shared_ptr<void> runnable_;  // null: nothing was enqueued
};

}  // namespace ehc::cuda_graph
