// Grids of CUDA kernels where a launch may cut the same work into more or fewer blocks: how many is
// a matter of speed alone, and no bit may depend on it.
#pragma once

#include <cstdint>

namespace ehc {

// How many blocks such a launch aims at: `preferred`, unless a check forces another number. At
// least 1. What is planned (a workspace) and what is launched must ask alike.
int64_t free_blocks(int64_t preferred);

// While it lives `free_blocks` answers `blocks`. For checks; one at a time, and no call meanwhile
// starts or ends it.
class ForcedGrid {
 public:
  explicit ForcedGrid(int64_t blocks);
  ~ForcedGrid();
  ForcedGrid(const ForcedGrid&) = delete;
  ForcedGrid& operator=(const ForcedGrid&) = delete;
  // Whether a kernel asked since it began.
  [[nodiscard]] bool was_asked() const;

 private:
  int64_t before_;
};

}  // namespace ehc
