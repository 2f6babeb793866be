// Combinations that have every pair of alternatives of two keys, instead of all products.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace ehc::cli {

// `counts[k]` alternatives of key k. Every returned combination has a position for each key; each
// pair of positions of two keys is in one of them, unless `refuses(k, i, l, j)` with k < l, which
// none has. The same for the same arguments everywhere.
std::vector<std::vector<int>> pairwise(std::span<const int> counts,
                                       const std::function<bool(int, int, int, int)>& refuses);

}  // namespace ehc::cli
