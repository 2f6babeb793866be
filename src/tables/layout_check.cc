// The laws of a hash layout. The tests of single numbers do not use the code that derived them.
#include <algorithm>
#include <limits>
#include <map>

#include "ehc/error.h"
#include "ehc/table.h"
#include "tables/primes.h"

namespace ehc::tables {
namespace {

// Where an element of a row-major [L, width] list belongs, for error texts.
std::string place(const HashLayoutConfig& config, size_t index, size_t width) {
  return "layer " + std::to_string(config.layer_ids[index / width]) + ", position " +
         std::to_string(index % width);
}

// First difference between stored and derived numbers; empty when there is none.
template <class T>
std::string difference(const HashLayoutConfig& config, const std::vector<T>& stored,
                       const std::vector<T>& derived) {
  const auto [got, expected] =
      std::mismatch(stored.begin(), stored.end(), derived.begin(), derived.end());
  if (got == stored.end()) return "";
  const auto index = static_cast<size_t>(got - stored.begin());
  return place(config, index, stored.size() / config.layer_ids.size()) + ": expected " +
         std::to_string(*expected) + ", got " + std::to_string(*got);
}

std::string first_even(const HashLayoutConfig& config, const std::vector<int64_t>& multipliers) {
  for (size_t i = 0; i < multipliers.size(); ++i) {
    if (multipliers[i] < 1 || multipliers[i] % 2 == 0) {
      return place(config, i, config.sizes.size() + 1) + ": expected an odd number >= 1, got " +
             std::to_string(multipliers[i]);
    }
  }
  return "";
}

std::string first_overflow(const HashLayoutConfig& config,
                           const std::vector<int64_t>& multipliers) {
  const int64_t largest_id = std::max<int64_t>(config.compressed_vocab, 2) - 1;
  const int64_t limit = std::numeric_limits<int64_t>::max() / largest_id;
  for (size_t i = 0; i < multipliers.size(); ++i) {
    if (multipliers[i] > limit) {
      return place(config, i, config.sizes.size() + 1) + ": expected at most " +
             std::to_string(limit) + ", got " + std::to_string(multipliers[i]);
    }
  }
  return "";
}

std::string first_composite(const HashLayoutConfig& config, const std::vector<int32_t>& sizes) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0 || !is_prime(static_cast<uint64_t>(sizes[i]))) {
      return place(config, i, static_cast<size_t>(config.columns())) + ": " +
             std::to_string(sizes[i]) + " is not prime";
    }
  }
  return "";
}

std::string first_repetition(const HashLayoutConfig& config, const std::vector<int32_t>& sizes) {
  const auto columns = static_cast<size_t>(config.columns());
  std::map<int32_t, size_t> first_use;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto [earlier, is_new] = first_use.emplace(sizes[i], i);
    if (!is_new) {
      return place(config, i, columns) + " repeats " + std::to_string(sizes[i]) + " of " +
             place(config, earlier->second, columns);
    }
  }
  return "";
}

// Offsets and row counts in one pass over a layer's sizes.
std::string first_wrong_sum(const HashLayoutConfig& config, const std::vector<int32_t>& sizes,
                            const std::vector<int64_t>& offsets, const std::vector<int64_t>& rows) {
  const auto columns = static_cast<size_t>(config.columns());
  for (size_t layer = 0; layer < config.layer_ids.size(); ++layer) {
    int64_t sum = 0;
    for (size_t i = layer * columns; i < (layer + 1) * columns; sum += sizes[i++]) {
      if (offsets[i] != sum) {
        return place(config, i, columns) + ": expected " + std::to_string(sum) + ", got " +
               std::to_string(offsets[i]);
      }
    }
    if (rows[layer] != sum) {
      return "rows of layer " + std::to_string(config.layer_ids[layer]) + ": expected " +
             std::to_string(sum) + ", got " + std::to_string(rows[layer]);
    }
  }
  return "";
}

}  // namespace

std::vector<LayoutCheck> HashLayout::check() const {
  std::vector<LayoutCheck> results;
  const auto add = [&](const char* law, std::string fault) {
    const bool holds = fault.empty();
    results.push_back({law, holds, std::move(fault)});
  };
  add("multipliers are odd", first_even(config_, multipliers_));
  add("products stay below 2^63", first_overflow(config_, multipliers_));
  add("sizes are prime", first_composite(config_, vocab_sizes_));
  add("sizes are distinct", first_repetition(config_, vocab_sizes_));
  add("offsets and rows are sums of sizes",
      first_wrong_sum(config_, vocab_sizes_, offsets_, rows_));
  try {
    const HashLayout derived = make(config_);
    add("multipliers follow from the configuration",
        difference(config_, multipliers_, derived.multipliers_));
    add("sizes follow from the configuration",
        difference(config_, vocab_sizes_, derived.vocab_sizes_));
  } catch (const Error& error) {
    add("the configuration is legal", error.what());
  }
  return results;
}

}  // namespace ehc::tables
