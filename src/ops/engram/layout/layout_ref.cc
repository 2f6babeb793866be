// The prime search by trial: every candidate in turn, and a set of what is taken.
#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "tables/primes.h"

namespace ehc::engram {

// Empty when the primes below 2^31 run out.
std::vector<int32_t> primes_reference(std::span<const int64_t> sizes, int64_t layers,
                                      int64_t heads) {
  std::vector<int32_t> found;
  std::set<int64_t> taken;
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (const int64_t size : sizes) {
      int64_t candidate = size;
      for (int64_t head = 0; head < heads; ++head) {
        while (
            candidate <= tables::kLargestTablePrime &&
            (taken.count(candidate) > 0 || !tables::is_prime(static_cast<uint64_t>(candidate)))) {
          ++candidate;
        }
        if (candidate > tables::kLargestTablePrime) return {};
        taken.insert(candidate);
        found.push_back(static_cast<int32_t>(candidate));
      }
    }
  }
  return found;
}

}  // namespace ehc::engram
