// Contexts of the C interface, kept between calls and lent to one thread at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ehc/c_api.h"

namespace ehc::python {

// Where a call runs. Host calls have stream 0 and index 0.
struct Place {
  int32_t device_type = EHC_HOST;
  int32_t device_index = 0;
  void* stream = nullptr;

  bool operator==(const Place&) const = default;
};

// A context for the length of a call. Concurrent calls get contexts of their own; so does a child
// process after fork, in which the threads of the parent's contexts do not exist.
class Lease {
 public:
  // `implementation` restricts the choice; empty lets the library choose.
  Lease(const Place& place, const std::string& implementation);
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  [[nodiscard]] ehc_context* get() const { return context_; }
  // Scratch memory of a host context, grown on demand and kept with it; null when there is none.
  [[nodiscard]] void* scratch(size_t bytes);

 private:
  Place place_;
  ehc_context* context_ = nullptr;
  std::vector<char> scratch_;
  uint64_t generation_ = 0;
  bool logs_ = false;
  bool forced_ = false;
};

// Threads of each host context from now on; 0 takes the number of usable cores.
void set_num_threads(int32_t threads);
[[nodiscard]] int32_t num_threads();

// While on, calls say which implementation ran; `take_log` returns the lines of this thread.
void set_log(bool on);
[[nodiscard]] std::string take_log();

}  // namespace ehc::python
