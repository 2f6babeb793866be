#include "contexts.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

#include "failure.h"

namespace ehc::python {

namespace {

struct Kept {
  Place place;
  ehc_context* context = nullptr;
  std::vector<char> scratch;
};

std::atomic<int32_t> threads{0};
std::atomic<bool> log_on{false};
thread_local std::string log_lines;

// Contexts that no call has. Never destroyed: calls may still come while the process ends.
struct Idle {
  std::mutex mutex;
  std::vector<Kept> contexts;
  uint64_t generation = 0;  // contexts of an earlier one are not taken back

  // Contexts of a process that forked are left alone: their threads do not exist here.
  void leave_to_parent() {
    new std::vector<Kept>(std::move(contexts));
    contexts = {};
    ++generation;
  }
};

Idle& idle() {
  static Idle* all = [] {
    auto* made = new Idle;
    pthread_atfork([] { idle().mutex.lock(); }, [] { idle().mutex.unlock(); },
                   [] {
                     idle().leave_to_parent();
                     idle().mutex.unlock();
                   });
    return made;
  }();
  return *all;
}

void append_line(void* /*user*/, const char* line) { log_lines.append(line).push_back('\n'); }

ehc_context* create(const Place& place) {
  ehc_context* context = nullptr;
  check(place.device_type == EHC_CUDA
            ? ehc_context_create_cuda(place.device_index, place.stream, &context)
            : ehc_context_create_cpu(threads, &context));
  return context;
}

// Takes an idle context of this place, if there is one.
bool take(const Place& place, Kept& out, uint64_t& generation) {
  Idle& all = idle();
  const std::lock_guard lock(all.mutex);
  generation = all.generation;
  const auto found = std::ranges::find(all.contexts, place, &Kept::place);
  if (found == all.contexts.end()) return false;
  std::swap(*found, all.contexts.back());
  out = std::move(all.contexts.back());
  all.contexts.pop_back();
  return true;
}

}  // namespace

Lease::Lease(const Place& place, const std::string& implementation)
    : place_(place), logs_(log_on), forced_(!implementation.empty()) {
  Kept kept;
  if (take(place, kept, generation_)) {
    context_ = kept.context;
    scratch_ = std::move(kept.scratch);
  } else {
    context_ = create(place);
  }
  if (logs_) ehc_context_set_log(context_, append_line, nullptr);
  if (forced_) ehc_context_set_implementation(context_, implementation.c_str());
}

Lease::~Lease() {
  ehc_context_set_workspace(context_, nullptr, 0);
  if (forced_) ehc_context_set_implementation(context_, nullptr);
  if (!logs_) {  // a log of EHC_VERBOSE=1 cannot be put back
    Idle& all = idle();
    const std::lock_guard lock(all.mutex);
    if (generation_ == all.generation) {
      all.contexts.push_back({place_, context_, std::move(scratch_)});
      return;
    }
  }
  ehc_context_destroy(context_);
}

void* Lease::scratch(size_t bytes) {
  if (place_.device_type != EHC_HOST) return nullptr;
  if (scratch_.size() < bytes) scratch_.resize(bytes);
  return scratch_.data();
}

void set_num_threads(int32_t count) {
  ehc_context* probe = nullptr;  // refuses what no context would take
  check(ehc_context_create_cpu(count, &probe));
  ehc_context_destroy(probe);
  Idle& all = idle();
  std::vector<Kept> old;
  {
    const std::lock_guard lock(all.mutex);
    threads = count;
    old.swap(all.contexts);
    ++all.generation;
  }
  for (const Kept& kept : old) ehc_context_destroy(kept.context);
}

int32_t num_threads() {
  const int32_t count = threads;
  return count > 0 ? count
                   : static_cast<int32_t>(std::max(1U, std::thread::hardware_concurrency()));
}

void set_log(bool on) { log_on = on; }

std::string take_log() { return std::exchange(log_lines, {}); }

}  // namespace ehc::python
