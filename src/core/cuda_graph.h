// Work that is captured instead of run, for checks and times. Here, so that the program needs no
// CUDA of its own.
#pragma once

#include <functional>

namespace ehc::cuda_graph {

// A stream of the device that is none of the default streams, so that work on it can be captured.
class Stream {
 public:
  explicit Stream(int index);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  [[nodiscard]] void* get() const { return stream_; }

 private:
  int index_;
  void* stream_ = nullptr;
};

// What `work` enqueues on `stream`, as a graph. Throws Error{internal} where it cannot be captured:
// when it allocates, synchronises or uses another stream that did not join, or when the graph has
// anything but kernels, copies and fills.
class Graph {
 public:
  Graph(int index, void* stream, const std::function<void()>& work);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  // Enqueues a replay.
  void launch() const;

 private:
  int index_;
  void* stream_;
  void* runnable_ = nullptr;  // null: nothing was enqueued
};

}  // namespace ehc::cuda_graph
