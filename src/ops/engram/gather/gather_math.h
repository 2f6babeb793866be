// What the gather loops share: the index of a column.
#pragma once

#include "core/host_device.h"
#include "ops/engram/gather/gather_args.h"

namespace ehc::engram {

EHC_HD int64_t gather_index(const GatherForwardArgs& a, int64_t t, int64_t c) {
  const int64_t at = t * a.index_token_stride + c;
  return a.indices_are_64 ? static_cast<const int64_t*>(a.indices)[at]
                          : static_cast<const int32_t*>(a.indices)[at];
}

}  // namespace ehc::engram
