// A persistent pool: no thread is created inside an operator. Workers sleep between calls; a brief
// spin would cost tens of microseconds whenever another process holds the core.
#pragma once

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "ehc/context.h"

namespace ehc {

class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int concurrency() const override { return static_cast<int>(workers_.size()) + 1; }
  // The caller works too. Calls from several threads take turns. The first exception of a body is
  // rethrown here once all are done. A body that calls run again works its indices off alone.
  void run(int64_t count, const std::function<void(int64_t)>& body) override;

 private:
  void work();
  void drain();

  std::vector<std::thread> workers_;
  std::mutex turn_;  // one run at a time
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  const std::function<void(int64_t)>* body_ = nullptr;
  int64_t count_ = 0;
  int64_t next_ = 0;
  int64_t active_ = 0;
  uint64_t generation_ = 0;
  bool stop_ = false;
  std::exception_ptr error_;
};

}  // namespace ehc
