#include "backends/cpu/cache.h"

#include <unistd.h>

#include <atomic>

namespace ehc {

namespace {

size_t known_cache_bytes() {
  long known = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  known = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
  return known > 0 ? static_cast<size_t>(known) : size_t{32} << 20;
}

std::atomic<size_t>& cache_bytes() {
  static std::atomic<size_t> bytes = known_cache_bytes();
  return bytes;
}

}  // namespace

size_t last_level_cache_bytes() { return cache_bytes().load(std::memory_order_relaxed); }

PretendedCache::PretendedCache(size_t bytes) : before_(cache_bytes().exchange(bytes)) {}
PretendedCache::~PretendedCache() { cache_bytes() = before_; }

}  // namespace ehc
