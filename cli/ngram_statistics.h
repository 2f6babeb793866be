// What the n-grams of a text do to the rows of one layer's tables: how often each occurs, which
// rows they share, and what uniform random rows would share (the birthday prediction).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <unordered_map>
#include <vector>

#include "ehc/table.h"

namespace ehc::cli {

// Throws of `balls` balls into `bins` bins, all equally likely.
struct Occupancy {
  double balls = 0;
  double bins = 1;

  [[nodiscard]] double expected_used() const;       // bins with at least one ball
  [[nodiscard]] double used_deviation() const;      // standard deviation of that number
  [[nodiscard]] double share_crowded() const;       // probability that a ball is not alone
  [[nodiscard]] double bins_with(int64_t k) const;  // expected number of bins with k balls
};

// Distribution of the number of successes of independent trials: result[j] = P(exactly j).
std::vector<double> count_distribution(std::span<const double> probabilities);

class NgramStatistics {
 public:
  // `layer` is the position in the layout's list. Rows of order o, head h are columns
  // (o - 2) * heads + h.
  NgramStatistics(const tables::HashLayout& layout, size_t layer);

  // Tokens first_token .. first_token + tokens: window [tokens, Nmax], rows [tokens, C] as
  // engram.hash gives them. Throws Error{internal} when a row lies outside its table or an n-gram
  // changes rows.
  void add(int64_t first_token, int64_t tokens, const int32_t* window, const int64_t* rows);

  // Distinct ids of slot 0 so far.
  [[nodiscard]] int64_t distinct_ids() const { return static_cast<int64_t>(ids_seen_); }
  // One object per order; `top` most frequent n-grams each.
  [[nodiscard]] nlohmann::ordered_json orders(size_t top) const;
  // Distinct rows touched by all n-grams.
  [[nodiscard]] int64_t rows_touched() const;

 private:
  struct Order {
    // (n-gram of the order below, next id) -> n-gram: exact for any order.
    std::unordered_map<uint64_t, uint32_t> known;
    std::vector<uint32_t> counts;  // [U]
    std::vector<int64_t> first;    // [U] token at which it occurred first
    std::vector<uint32_t> rows;    // [U, heads], within the table of the head
    std::vector<int64_t> sizes;    // [heads]
    std::vector<int64_t> offsets;  // [heads]
  };

  uint32_t intern(Order& order, uint32_t shorter, int32_t id, int64_t token, const int64_t* rows);
  [[nodiscard]] nlohmann::ordered_json describe(size_t at, size_t top) const;
  [[nodiscard]] nlohmann::ordered_json tables_of(const Order& order) const;
  [[nodiscard]] nlohmann::ordered_json joint_collisions(const Order& order) const;
  [[nodiscard]] nlohmann::ordered_json most_frequent(const Order& order, size_t top) const;

  size_t heads_;
  std::vector<Order> orders_;
  std::vector<bool> id_seen_;
  size_t ids_seen_ = 0;
  std::vector<uint32_t> touches_;  // [rows of the layer]
};

}  // namespace ehc::cli
