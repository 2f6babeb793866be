#include "core/thread_pool.h"

#include <system_error>

#include "ehc/error.h"

namespace ehc {

namespace {

// The pool whose body this thread is in: a nested run would wait for itself.
thread_local const ThreadPool* t_inside = nullptr;

class Inside {
 public:
  explicit Inside(const ThreadPool* pool) : outer_(t_inside) { t_inside = pool; }
  ~Inside() { t_inside = outer_; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  const ThreadPool* outer_;
};

}  // namespace

ThreadPool::ThreadPool(int threads) {
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
    // Fewer threads than asked for: results do not depend on their number.
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

// Takes indices until none is left. `mutex_` guards the counter: a body is thousands of times
// longer than the lock is held.
void ThreadPool::drain() {
  const Inside inside(this);
  std::unique_lock lock(mutex_);
  while (next_ < count_) {
    const int64_t index = next_++;
    const auto* body = body_;
    lock.unlock();
    std::exception_ptr error;
    try {
      (*body)(index);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error && !error_) error_ = error;
  }
}

void ThreadPool::work() {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stop_ || (generation_ != seen && next_ < count_); });
    if (stop_) return;
    seen = generation_;
    ++active_;
    lock.unlock();
    drain();
    lock.lock();
    if (--active_ == 0) done_.notify_one();
  }
}

void ThreadPool::run(int64_t count, const std::function<void(int64_t)>& body) {
  if (count <= 0) return;
  if (workers_.empty() || count == 1 || t_inside == this) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  const std::lock_guard turn(turn_);
  {
    const std::lock_guard lock(mutex_);
    body_ = &body;
    count_ = count;
    next_ = 0;
    error_ = nullptr;
    ++generation_;
  }
  wake_.notify_all();
  drain();
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return active_ == 0; });
  body_ = nullptr;
  count_ = next_ = 0;
  if (error_) std::rethrow_exception(error_);
}

}  // namespace ehc
