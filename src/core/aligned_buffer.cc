#include "core/aligned_buffer.h"

#include <algorithm>
#include <string>

#include "ehc/error.h"

namespace ehc {

AlignedBuffer::AlignedBuffer(uint64_t bytes) {
  const uint64_t padded = align_up(std::max<uint64_t>(bytes, 1));
  if (padded >= bytes && padded <= uint64_t{PTRDIFF_MAX}) {
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(kDataAlignment, padded)));
  }
  if (!data_) {
    throw Error(ErrorKind::internal, "memory: cannot allocate " + std::to_string(bytes) + " bytes");
  }
}

}  // namespace ehc
