#include "backends/cpu/cache.h"

#include <unistd.h>

namespace ehc {

size_t last_level_cache_bytes() {
  static const size_t bytes = [] {
    long known = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
    known = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    return known > 0 ? static_cast<size_t>(known) : size_t{32} << 20;
  }();
  return bytes;
}

}  // namespace ehc
