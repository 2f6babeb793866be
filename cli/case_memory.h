// Memory that cases take turns in: to allocate and release it takes a device longer than most
// cases, and stops the other processes that share it.
#pragma once

#include "ehc/memory.h"

namespace ehc::cli {

class CaseMemory {
 public:
  CaseMemory() = default;
  // `exact`: of this size alone and for nobody else, as tools want it that watch memory.
  CaseMemory(const Context& context, size_t bytes, bool exact);
  // Work on it must be done.
  ~CaseMemory();
  CaseMemory(CaseMemory&& other) noexcept;
  CaseMemory& operator=(CaseMemory&& other) noexcept;
  CaseMemory(const CaseMemory&) = delete;
  CaseMemory& operator=(const CaseMemory&) = delete;

  [[nodiscard]] void* data() const { return memory_.data(); }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  Buffer memory_;
  size_t bytes_ = 0;
  int pool_ = -1;  // the device whose pool gets it back, or none
};

}  // namespace ehc::cli
