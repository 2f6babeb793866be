#include "tables/hash_layout.h"

#include <algorithm>
#include <limits>
#include <string>

#include "core/splitmix64.h"
#include "ehc/error.h"
#include "tables/numpy_random.h"
#include "tables/primes.h"

namespace ehc::tables {
namespace {

constexpr int64_t kLayerStride = 10007;
constexpr int64_t kLargestI32 = std::numeric_limits<int32_t>::max();

[[noreturn]] void throw_contract(const std::string& what) {
  throw Error(ErrorKind::contract, what);
}

void check_attribute(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return;
  const std::string range = most == std::numeric_limits<int64_t>::max()
                                ? ">= " + std::to_string(least)
                                : std::to_string(least) + ".." + std::to_string(most);
  throw_contract(std::string("attribute '") + name + "': expected " + range + ", got " +
                 std::to_string(value));
}

void check_at_least(const char* name, std::span<const int64_t> values, int64_t least) {
  if (values.empty()) {
    throw_contract(std::string("attribute '") + name + "': expected at least one value, got none");
  }
  for (const int64_t value : values) {
    check_attribute(name, value, least, std::numeric_limits<int64_t>::max());
  }
}

void check_vocab_sizes(std::span<const int32_t> vocab_sizes, int64_t layers) {
  const bool divides = layers > 0 && vocab_sizes.size() % static_cast<size_t>(layers) == 0;
  if (!divides && (layers != 0 || !vocab_sizes.empty())) {
    throw_contract("tensor 'vocab_sizes': expected a multiple of " + std::to_string(layers) +
                   " layers, got " + std::to_string(vocab_sizes.size()) + " sizes");
  }
  for (const int32_t size : vocab_sizes) {
    if (size < 1) {
      throw_contract("tensor 'vocab_sizes': expected sizes >= 1, got " + std::to_string(size));
    }
  }
}

// The primes in use, as a bit map whose pages appear when touched.
class TakenPrimes {
 public:
  // False when the prime was taken before.
  bool take(int64_t prime) {
    std::vector<bool>& page = pages_[static_cast<size_t>(prime / kPageSize)];
    if (page.empty()) page.resize(kPageSize);
    std::vector<bool>::reference taken = page[static_cast<size_t>(prime % kPageSize)];
    if (taken) return false;
    taken = true;
    return true;
  }

 private:
  static constexpr int64_t kPageSize = 1 << 20;
  std::vector<std::vector<bool>> pages_ =
      std::vector<std::vector<bool>>(kLargestTablePrime / kPageSize + 1);
};

}  // namespace

size_t checked_prime_count(int64_t layers, int64_t orders, int64_t heads) {
  int64_t count = 0;
  if (__builtin_mul_overflow(layers, orders, &count) ||
      __builtin_mul_overflow(count, heads, &count) || count > kTablePrimeCount) {
    throw_contract("attribute 'layers': expected layers * orders * heads <= " +
                   std::to_string(kTablePrimeCount) + ", the number of primes up to 2^31-1, got " +
                   std::to_string(layers) + " * " + std::to_string(orders) + " * " +
                   std::to_string(heads));
  }
  return static_cast<size_t>(count);
}

int64_t half_range(int64_t compressed_vocab) {
  const int64_t largest_factor = std::numeric_limits<int64_t>::max() / compressed_vocab;
  return std::max<int64_t>(1, largest_factor / 2);
}

std::vector<int64_t> hash_multipliers(std::span<const int64_t> layer_ids, int64_t max_ngram,
                                      int64_t compressed_vocab, int64_t seed,
                                      MultiplierScheme scheme) {
  constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();
  check_at_least("layer_ids", layer_ids, 0);
  check_attribute("max_ngram", max_ngram, kSmallestMaxNgram, kLargestMaxNgram);
  check_attribute("compressed_vocab", compressed_vocab, 1, kUnbounded);
  check_attribute("seed", seed, 0, kUnbounded);
  const auto half = static_cast<uint64_t>(half_range(compressed_vocab));

  std::vector<int64_t> multipliers;
  multipliers.reserve(layer_ids.size() * static_cast<size_t>(max_ngram));
  for (const int64_t layer_id : layer_ids) {
    // NumPy's seeds are unbounded integers; 128 bits hold every sum that can occur.
    const uint128 layer_seed =
        static_cast<uint64_t>(seed) + uint128{kLayerStride} * static_cast<uint64_t>(layer_id);
    NumpyGenerator generator(layer_seed);
    for (int64_t i = 0; i < max_ngram; ++i) {
      const uint64_t r =
          scheme == MultiplierScheme::numpy
              ? generator.integer_below(half)
              : splitmix64(static_cast<uint64_t>(layer_seed), static_cast<uint64_t>(i)) % half;
      multipliers.push_back(static_cast<int64_t>(2 * r + 1));
    }
  }
  return multipliers;
}

std::vector<int32_t> hash_primes(std::span<const int64_t> sizes, int64_t layers, int64_t heads) {
  check_at_least("sizes", sizes, 1);
  check_attribute("layers", layers, 1, std::numeric_limits<int64_t>::max());
  check_attribute("heads", heads, 1, std::numeric_limits<int64_t>::max());
  const size_t orders = sizes.size();
  const size_t count = checked_prime_count(layers, static_cast<int64_t>(orders), heads);

  // What is taken stays taken, so an order that starts over in the next layer would skip
  // everything up to where it stopped: it continues there.
  std::vector<PrimeCursor> cursors(sizes.begin(), sizes.end());
  TakenPrimes taken;

  std::vector<int32_t> vocab_sizes;
  vocab_sizes.reserve(count);
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (size_t order = 0; order < orders; ++order) {
      for (int64_t head = 0; head < heads; ++head) {
        int64_t prime = 0;
        do {
          prime = cursors[order].next();
        } while (prime != 0 && !taken.take(prime));
        if (prime == 0) {
          throw_contract("attribute 'sizes': expected a free prime up to 2^31-1 from " +
                         std::to_string(sizes[order]) + " on for layer " + std::to_string(layer) +
                         ", order " + std::to_string(order + 2) + ", head " + std::to_string(head) +
                         ", got none");
        }
        vocab_sizes.push_back(static_cast<int32_t>(prime));
      }
    }
  }
  return vocab_sizes;
}

std::vector<int64_t> hash_offsets(std::span<const int32_t> vocab_sizes, int64_t layers,
                                  DType index_dtype) {
  if (index_dtype != DType::i32 && index_dtype != DType::i64) {
    throw_contract("attribute 'index_dtype': expected I32 or I64, got " +
                   std::string(name_of(index_dtype)));
  }
  check_vocab_sizes(vocab_sizes, layers);
  const size_t columns = vocab_sizes.size() / static_cast<size_t>(std::max<int64_t>(layers, 1));
  std::vector<int64_t> offsets;
  offsets.reserve(vocab_sizes.size());
  for (int64_t layer = 0; layer < layers; ++layer) {
    int64_t sum = 0;
    for (const int32_t size : vocab_sizes.subspan(static_cast<size_t>(layer) * columns, columns)) {
      offsets.push_back(sum);
      sum += size;
    }
    if (index_dtype == DType::i32 && sum > kLargestI32) {
      throw_contract("tensor 'vocab_sizes': expected sums <= 2147483647 for I32 offsets, got " +
                     std::to_string(sum) + " in layer " + std::to_string(layer));
    }
  }
  return offsets;
}

std::vector<int64_t> row_counts(std::span<const int32_t> vocab_sizes, int64_t layers) {
  check_vocab_sizes(vocab_sizes, layers);
  const size_t columns = vocab_sizes.size() / static_cast<size_t>(std::max<int64_t>(layers, 1));
  std::vector<int64_t> rows(static_cast<size_t>(layers));
  for (size_t i = 0; i < vocab_sizes.size(); ++i) rows[i / columns] += vocab_sizes[i];
  return rows;
}

}  // namespace ehc::tables
