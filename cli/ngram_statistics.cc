#include "cli/ngram_statistics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "ehc/error.h"

namespace ehc::cli {

using Json = nlohmann::ordered_json;

double Occupancy::expected_used() const {
  return -bins * std::expm1(balls * std::log1p(-1 / bins));
}

double Occupancy::used_deviation() const {
  // p1, p2: probability that one bin, two bins stay empty. p2 - p1^2 is tiny, hence expm1.
  const double log_one = balls * std::log1p(-1 / bins);
  const double log_two = balls * std::log1p(-2 / bins);
  const double p1 = std::exp(log_one);
  const double p2 = std::exp(log_two);
  const double covariance = p1 * p1 * std::expm1(log_two - 2 * log_one);
  return std::sqrt(std::max(0.0, bins * (p1 - p2) + bins * bins * covariance));
}

double Occupancy::share_crowded() const {
  return balls < 1 ? 0 : -std::expm1((balls - 1) * std::log1p(-1 / bins));
}

double Occupancy::bins_with(int64_t k) const {
  const auto count = static_cast<double>(k);
  if (count > balls) return 0;
  const double log_choose =
      std::lgamma(balls + 1) - std::lgamma(count + 1) - std::lgamma(balls - count + 1);
  return bins *
         std::exp(log_choose - count * std::log(bins) + (balls - count) * std::log1p(-1 / bins));
}

std::vector<double> count_distribution(std::span<const double> probabilities) {
  std::vector<double> result(probabilities.size() + 1, 0.0);
  result[0] = 1;
  for (size_t trial = 0; trial < probabilities.size(); ++trial) {
    const double p = probabilities[trial];
    for (size_t j = trial + 1; j > 0; --j) result[j] = result[j] * (1 - p) + result[j - 1] * p;
    result[0] *= 1 - p;
  }
  return result;
}

namespace {

// Log-spaced points (rank, value) of values sorted downwards, first and last included.
Json frequency_curve(std::vector<uint32_t> values) {
  std::sort(values.begin(), values.end(), std::greater<>());
  Json ranks = Json::array();
  Json counts = Json::array();
  const size_t size = values.size();
  for (double rank = 1; size > 0;) {
    const size_t at = std::min(static_cast<size_t>(rank), size);
    ranks.push_back(at);
    counts.push_back(values[at - 1]);
    if (at == size) break;
    rank = std::max(rank + 1, rank * 1.1);
  }
  return {{"ranks", std::move(ranks)}, {"counts", std::move(counts)}};
}

// How many n-grams each row of one table holds.
std::vector<uint32_t> load_of(std::span<const uint32_t> rows, size_t heads, size_t head,
                              int64_t size) {
  std::vector<uint32_t> load(static_cast<size_t>(size), 0);
  for (size_t at = head; at < rows.size(); at += heads) ++load[rows[at]];
  return load;
}

}  // namespace

NgramStatistics::NgramStatistics(const tables::HashLayout& layout, size_t layer)
    : heads_(static_cast<size_t>(layout.config().heads)),
      orders_(layout.config().sizes.size()),
      id_seen_(static_cast<size_t>(layout.config().compressed_vocab), false),
      touches_(static_cast<size_t>(layout.rows()[layer]), 0) {
  size_t column = layer * orders_.size() * heads_;
  for (Order& order : orders_) {
    for (size_t head = 0; head < heads_; ++head, ++column) {
      order.sizes.push_back(layout.vocab_sizes()[column]);
      order.offsets.push_back(layout.offsets()[column]);
    }
  }
}

uint32_t NgramStatistics::intern(Order& order, uint32_t shorter, int32_t id, int64_t token,
                                 const int64_t* rows) {
  const uint64_t key = uint64_t{shorter} << 32 | static_cast<uint32_t>(id);
  const auto [entry, is_new] =
      order.known.try_emplace(key, static_cast<uint32_t>(order.counts.size()));
  const uint32_t ngram = entry->second;
  if (is_new) {
    order.counts.push_back(0);
    order.first.push_back(token);
  }
  ++order.counts[ngram];
  for (size_t head = 0; head < heads_; ++head) {
    const int64_t row = rows[head] - order.offsets[head];
    if (row < 0 || row >= order.sizes[head]) {
      throw Error(ErrorKind::internal,
                  fmt::format("token {}: row {} is outside its table", token, rows[head]));
    }
    if (is_new) order.rows.push_back(static_cast<uint32_t>(row));
    if (order.rows[ngram * heads_ + head] != static_cast<uint32_t>(row)) {
      throw Error(
          ErrorKind::internal,
          fmt::format("token {}: the same n-gram addresses another row than before", token));
    }
    ++touches_[static_cast<size_t>(rows[head])];
  }
  return ngram;
}

void NgramStatistics::add(int64_t first_token, int64_t tokens, const int32_t* window,
                          const int64_t* rows) {
  const size_t slots = orders_.size() + 1;
  for (int64_t t = 0; t < tokens; ++t) {
    const int32_t* ids = window + static_cast<size_t>(t) * slots;
    const int64_t* row = rows + static_cast<size_t>(t) * orders_.size() * heads_;
    auto ngram = static_cast<uint32_t>(ids[0]);
    if (!id_seen_[ngram]) {
      id_seen_[ngram] = true;
      ++ids_seen_;
    }
    for (size_t order = 0; order < orders_.size(); ++order, row += heads_) {
      ngram = intern(orders_[order], ngram, ids[order + 1], first_token + t, row);
    }
  }
}

int64_t NgramStatistics::rows_touched() const {
  return static_cast<int64_t>(touches_.size()) -
         std::count(touches_.begin(), touches_.end(), uint32_t{0});
}

// Per table: rows used and n-grams that share one, both measured and predicted; then per order: how
// many n-grams a row holds, and in how many heads an n-gram is not alone.
Json NgramStatistics::tables_of(const Order& order) const {
  const size_t ngrams = order.counts.size();
  constexpr size_t kLoads = 12;  // the last one is "and more"
  std::vector<double> measured_loads(kLoads + 1, 0.0);
  std::vector<double> predicted_loads(kLoads + 1, 0.0);
  std::vector<uint8_t> crowded_heads(ngrams, 0);
  std::vector<double> crowded_probability;
  Json json;
  json["tables"] = Json::array();
  for (size_t head = 0; head < heads_; ++head) {
    const std::vector<uint32_t> load = load_of(order.rows, heads_, head, order.sizes[head]);
    const Occupancy model{static_cast<double>(ngrams), static_cast<double>(order.sizes[head])};
    int64_t used = 0;
    int64_t crowded = 0;
    for (const uint32_t k : load) {
      used += k > 0;
      crowded += k > 1 ? k : 0;
      measured_loads[std::min<size_t>(k, kLoads)] += 1;
    }
    double rest = model.bins;
    for (size_t k = 0; k < kLoads; ++k) {
      const double bins = model.bins_with(static_cast<int64_t>(k));
      predicted_loads[k] += bins;
      rest -= bins;
    }
    predicted_loads[kLoads] += std::max(0.0, rest);
    for (size_t ngram = 0; ngram < ngrams; ++ngram) {
      crowded_heads[ngram] += load[order.rows[ngram * heads_ + head]] > 1;
    }
    crowded_probability.push_back(model.share_crowded());
    json["tables"].push_back({{"head", head},
                              {"size", order.sizes[head]},
                              {"ngrams", ngrams},
                              {"rows_used", used},
                              {"rows_used_predicted", model.expected_used()},
                              {"rows_used_deviation", model.used_deviation()},
                              {"ngrams_sharing", crowded},
                              {"ngrams_sharing_predicted", model.balls * model.share_crowded()}});
  }
  json["row_load"] = {{"measured", measured_loads}, {"predicted", predicted_loads}};
  std::vector<int64_t> measured(heads_ + 1, 0);
  for (const uint8_t heads : crowded_heads) ++measured[heads];
  std::vector<double> predicted = count_distribution(crowded_probability);
  for (double& p : predicted) p *= static_cast<double>(ngrams);
  json["heads_shared"] = {{"measured", measured}, {"predicted", predicted}};
  return json;
}

// Pairs of n-grams that meet in j heads at once. All pairs that meet at all are listed, so only as
// many n-grams take part as give some ten million pairs.
Json NgramStatistics::joint_collisions(const Order& order) const {
  constexpr double kMostPairs = 1e7;
  double per_square = 0;  // expected pairs = n^2 * this
  std::vector<double> meeting;
  for (const int64_t size : order.sizes) {
    meeting.push_back(1 / static_cast<double>(size));
    per_square += 0.5 / static_cast<double>(size);
  }
  const size_t ngrams =
      std::min(order.counts.size(), static_cast<size_t>(std::sqrt(kMostPairs / per_square)));
  std::vector<uint64_t> pairs;
  std::vector<std::pair<uint32_t, uint32_t>> by_row(ngrams);
  for (size_t head = 0; head < heads_; ++head) {
    for (size_t ngram = 0; ngram < ngrams; ++ngram) {
      by_row[ngram] = {order.rows[ngram * heads_ + head], static_cast<uint32_t>(ngram)};
    }
    std::sort(by_row.begin(), by_row.end());
    for (size_t a = 0; a < ngrams; ++a) {
      for (size_t b = a + 1; b < ngrams && by_row[b].first == by_row[a].first; ++b) {
        pairs.push_back(uint64_t{by_row[a].second} << 32 | by_row[b].second);
      }
    }
  }
  std::sort(pairs.begin(), pairs.end());
  std::vector<int64_t> measured(heads_ + 1, 0);  // [j] pairs that meet in j heads or more
  for (size_t at = 0; at < pairs.size();) {
    size_t end = at;
    while (end < pairs.size() && pairs[end] == pairs[at]) ++end;
    for (size_t j = 1; j <= end - at; ++j) ++measured[j];
    at = end;
  }
  const auto count = static_cast<double>(ngrams);
  const double all_pairs = 0.5 * count * (count - 1);
  measured[0] = static_cast<int64_t>(all_pairs);
  std::vector<double> predicted = count_distribution(meeting);
  for (size_t j = heads_; j-- > 0;) predicted[j] += predicted[j + 1];
  for (double& p : predicted) p *= all_pairs;
  return {{"ngrams", ngrams}, {"measured", measured}, {"predicted", predicted}};
}

Json NgramStatistics::most_frequent(const Order& order, size_t top) const {
  std::vector<uint32_t> ranked(order.counts.size());
  std::iota(ranked.begin(), ranked.end(), 0U);
  const auto shown = static_cast<std::ptrdiff_t>(std::min(top, ranked.size()));
  std::partial_sort(
      ranked.begin(), ranked.begin() + shown, ranked.end(), [&](uint32_t a, uint32_t b) {
        return order.counts[a] != order.counts[b] ? order.counts[a] > order.counts[b] : a < b;
      });
  ranked.resize(static_cast<size_t>(shown));
  std::vector<std::vector<uint32_t>> load;
  for (size_t head = 0; head < heads_; ++head) {
    load.push_back(load_of(order.rows, heads_, head, order.sizes[head]));
  }
  Json list = Json::array();
  std::vector<int64_t> hit;
  for (const uint32_t ngram : ranked) {
    Json rows = Json::array();
    int64_t others = 0;
    int64_t shared_heads = 0;
    for (size_t head = 0; head < heads_; ++head) {
      const uint32_t row = order.rows[ngram * heads_ + head];
      hit.push_back(order.offsets[head] + row);
      rows.push_back(hit.back());
      others += load[head][row] - 1;
      shared_heads += load[head][row] > 1;
    }
    list.push_back({{"count", order.counts[ngram]},
                    {"first_token", order.first[ngram]},
                    {"rows", std::move(rows)},
                    {"heads_shared", shared_heads},
                    {"other_ngrams_in_its_rows", others}});
  }
  std::sort(hit.begin(), hit.end());
  hit.erase(std::unique(hit.begin(), hit.end()), hit.end());
  return {{"ngrams", std::move(list)}, {"distinct_rows", hit.size()}};
}

Json NgramStatistics::describe(size_t at, size_t top) const {
  const Order& order = orders_[at];
  Json json;
  json["order"] = at + 2;
  json["distinct_ngrams"] = order.counts.size();
  json["occurring_once"] = std::count(order.counts.begin(), order.counts.end(), uint32_t{1});
  json.update(tables_of(order));
  json["joint_collisions"] = joint_collisions(order);
  json["most_frequent"] = most_frequent(order, top);
  const auto begin = touches_.begin() + order.offsets.front();
  std::vector<uint32_t> touched(
      begin, begin + std::accumulate(order.sizes.begin(), order.sizes.end(), int64_t{0}));
  std::erase(touched, 0U);
  json["rows_touched"] = touched.size();
  json["row_frequency"] = frequency_curve(std::move(touched));
  json["ngram_frequency"] = frequency_curve(order.counts);
  return json;
}

Json NgramStatistics::orders(size_t top) const {
  Json json = Json::array();
  for (size_t at = 0; at < orders_.size(); ++at) json.push_back(describe(at, top));
  return json;
}

}  // namespace ehc::cli
