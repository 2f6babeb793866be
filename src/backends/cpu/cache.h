// Sizes of the processor's caches.
#pragma once

#include <cstddef>

namespace ehc {

// Bytes of the largest cache; 32 MiB where the system does not tell.
size_t last_level_cache_bytes();

// While it lives that function returns `bytes`: with 0 every call is a large one, so that small
// cases show what kernels do for those. For checks; one at a time, and no call meanwhile starts or
// ends it.
class PretendedCache {
 public:
  explicit PretendedCache(size_t bytes);
  ~PretendedCache();
  PretendedCache(const PretendedCache&) = delete;
  PretendedCache& operator=(const PretendedCache&) = delete;

 private:
  size_t before_;
};

}  // namespace ehc
