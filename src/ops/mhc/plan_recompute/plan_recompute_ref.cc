// The search for a block length, in integers.
#include <algorithm>
#include <limits>

#include "ops/mhc/plan_recompute/plan_recompute_args.h"

namespace ehc::mhc {

RecomputePlan search_recompute_plan(int64_t streams, std::span<const int64_t> stages) {
  RecomputePlan best;
  int64_t least = std::numeric_limits<int64_t>::max();
  const int64_t longest = *std::max_element(stages.begin(), stages.end());
  // What a block holds while it runs is enough to end the search.
  for (int64_t length = 1; length <= longest && (streams + 2) * length < least; ++length) {
    int64_t blocks = 0;
    for (const int64_t layers : stages) blocks += (layers + length - 1) / length;
    const int64_t cost = streams * blocks + (streams + 2) * length;
    if (cost >= least) continue;
    least = cost;
    best = {length, blocks};
  }
  return best;
}

}  // namespace ehc::mhc
