// What the search for a block length takes and gives.
#pragma once

#include <cstdint>
#include <span>

namespace ehc::mhc {

struct RecomputePlan {
  int64_t block_length = 0;
  int64_t blocks = 0;
};

// The block length that makes n * blocks + (n+2) * block_length smallest; the smaller one of two.
RecomputePlan search_recompute_plan(int64_t streams, std::span<const int64_t> stages);

}  // namespace ehc::mhc
