// One compressed id.
#pragma once

#include "core/host_device.h"
#include "ops/engram/compress_ids/compress_ids_args.h"

namespace ehc::engram {

EHC_HD int32_t compressed_id(const CompressIdsArgs& a, int64_t id) {
  if (id >= 0 && id < a.vocab) return a.table[id];
  return id < 0 && id >= INT32_MIN ? static_cast<int32_t>(id) : -1;
}

}  // namespace ehc::engram
