#include "core/forced_grid.h"

#include <algorithm>
#include <atomic>

namespace ehc {

namespace {

std::atomic<int64_t> forced{0};  // 0: none
std::atomic<bool> asked{false};

}  // namespace

int64_t free_blocks(int64_t preferred) {
  asked = true;
  const int64_t blocks = forced;
  return std::max<int64_t>(1, blocks > 0 ? blocks : preferred);
}

ForcedGrid::ForcedGrid(int64_t blocks) : before_(forced.exchange(blocks)) { asked = false; }
ForcedGrid::~ForcedGrid() { forced = before_; }
bool ForcedGrid::was_asked() const { return asked; }

}  // namespace ehc
