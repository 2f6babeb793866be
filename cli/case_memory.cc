#include "cli/case_memory.h"

#include <bit>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace ehc::cli {

namespace {

constexpr size_t kLargest = size_t{1} << 26;  // that a pool keeps

struct Pool {
  std::mutex mutex;
  std::map<std::pair<int, size_t>, std::vector<Buffer>> free;  // by device and bytes
};
Pool& pool() {
  static Pool all;
  return all;
}

}  // namespace

CaseMemory::CaseMemory(const Context& context, size_t bytes, bool exact) : bytes_(bytes) {
  if (exact || bytes == 0 || bytes > kLargest || context.device() == Device::cpu) {
    memory_ = Buffer(context, bytes);
    return;
  }
  pool_ = context.device_index();
  const size_t size = std::bit_ceil(bytes);
  {
    const std::lock_guard lock(pool().mutex);
    std::vector<Buffer>& free = pool().free[{pool_, size}];
    if (!free.empty()) {
      memory_ = std::move(free.back());
      free.pop_back();
      return;
    }
  }
  memory_ = Buffer(context, size);
}

CaseMemory::~CaseMemory() {
  if (pool_ < 0) return;
  const std::lock_guard lock(pool().mutex);
  pool().free[{pool_, memory_.bytes()}].push_back(std::move(memory_));
}

CaseMemory::CaseMemory(CaseMemory&& other) noexcept { *this = std::move(other); }

CaseMemory& CaseMemory::operator=(CaseMemory&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(bytes_, other.bytes_);
  std::swap(pool_, other.pool_);
  return *this;
}

}  // namespace ehc::cli
