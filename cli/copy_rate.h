// The ceiling of a benchmark: how fast this machine copies memory right now.
#pragma once

#include "ehc/context.h"
#include "ehc/memory.h"

namespace ehc::cli {

// Copies between two buffers far above the caches, on the threads (or the device) of a context.
class CopyRate {
 public:
  explicit CopyRate(const Context& context) : context_(context) {}
  // Bytes read and written per second by the fastest of several ways to copy, now and in any
  // earlier call.
  double measure();
  // The way that was fastest.
  [[nodiscard]] const char* best_way() const { return best_way_; }
  // On a device, measured beside the copy, else 0: bytes per second read alone, and read once and
  // written to four rows.
  [[nodiscard]] double read() const { return read_; }
  [[nodiscard]] double one_to_four() const { return one_to_four_; }

 private:
  Context context_;
  Buffer from_;
  Buffer to_;
  double best_ = 0, read_ = 0, one_to_four_ = 0;
  const char* best_way_ = "";
};

}  // namespace ehc::cli
