// Addressing of the n-gram hash: multipliers, table sizes, offsets (operator contract 1.3, 1.4).
// Plain functions on host memory; the texts of their errors name attribute or tensor as the
// operators of the same names do.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ehc/dtype.h"
#include "ehc/table.h"

namespace ehc::tables {

inline constexpr int64_t kSmallestMaxNgram = 2;
inline constexpr int64_t kLargestMaxNgram = 8;

// Multipliers are 2 r + 1 with r in [0, half): id * multiplier < 2^63 for every id < vocab.
[[nodiscard]] int64_t half_range(int64_t compressed_vocab);

// I64 [L, max_ngram] for L = layer_ids.size(). Scheme numpy draws a layer's r from
// default_rng(seed + 10007 layer_id), splitmix64 takes the i-th output of the stream that starts at
// seed + 10007 layer_id (wrapping), mod half.
[[nodiscard]] std::vector<int64_t> hash_multipliers(std::span<const int64_t> layer_ids,
                                                    int64_t max_ngram, int64_t compressed_vocab,
                                                    int64_t seed, MultiplierScheme scheme);

// layers * orders * heads; Error{contract} when there are fewer primes below 2^31.
[[nodiscard]] size_t checked_prime_count(int64_t layers, int64_t orders, int64_t heads);

// I32 [layers, orders, heads] with orders = sizes.size(): primes that are distinct in the whole
// model. Layer by layer and order by order, the search starts at the order's own size (the first
// candidate) and every head takes the next prime that nobody has taken. With equal sizes that is
// the convention "prime number (layer, order, head) from the size on" of the Qwen tables.
[[nodiscard]] std::vector<int32_t> hash_primes(std::span<const int64_t> sizes, int64_t layers,
                                               int64_t heads);

// I64 [layers, columns]: exclusive prefix sums of a layer's sizes, from 0 in each layer. With
// index_dtype i32 a layer whose sum exceeds 2^31 - 1 is an error.
[[nodiscard]] std::vector<int64_t> hash_offsets(std::span<const int32_t> vocab_sizes,
                                                int64_t layers, DType index_dtype);

// I64 [layers]: sums of a layer's sizes.
[[nodiscard]] std::vector<int64_t> row_counts(std::span<const int32_t> vocab_sizes, int64_t layers);

}  // namespace ehc::tables
