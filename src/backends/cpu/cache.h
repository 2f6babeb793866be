// Sizes of the processor's caches.
#pragma once

#include <cstddef>

namespace ehc {

// Bytes of the largest cache; 32 MiB where the system does not tell.
size_t last_level_cache_bytes();

}  // namespace ehc
