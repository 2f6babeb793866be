#include "cli/pairwise.h"

#include <algorithm>

namespace ehc::cli {

namespace {

// Pairs that no combination has yet, and those that none may have.
class Pairs {
 public:
  Pairs(std::span<const int> counts, const std::function<bool(int, int, int, int)>& refuses)
      : counts_(counts) {
    for (const int count : counts) {
      first_.push_back(total_);
      total_ += count;
    }
    state_.assign(static_cast<size_t>(total_) * static_cast<size_t>(total_), State::covered);
    const int keys = static_cast<int>(counts.size());
    for (int k = 0; k < keys; ++k) {
      for (int l = k + 1; l < keys; ++l) {
        for (int i = 0; i < counts[static_cast<size_t>(k)]; ++i) {
          for (int j = 0; j < counts[static_cast<size_t>(l)]; ++j) {
            at(k, i, l, j) = refuses(k, i, l, j) ? State::refused : State::open;
          }
        }
      }
    }
  }
  [[nodiscard]] bool is_refused(int k, int i, int l, int j) {
    return at(k, i, l, j) == State::refused;
  }
  [[nodiscard]] bool is_open(int k, int i, int l, int j) { return at(k, i, l, j) == State::open; }
  void cover(int k, int i, int l, int j) { at(k, i, l, j) = State::covered; }

 private:
  enum class State : char { open, covered, refused };
  State& at(int k, int i, int l, int j) {
    if (k > l) {
      std::swap(k, l);
      std::swap(i, j);
    }
    const int row = first_[static_cast<size_t>(k)] + i;
    const int column = first_[static_cast<size_t>(l)] + j;
    return state_[static_cast<size_t>(row) * static_cast<size_t>(total_) +
                  static_cast<size_t>(column)];
  }
  std::span<const int> counts_;
  std::vector<int> first_;
  int total_ = 0;
  std::vector<State> state_;
};

}  // namespace

// Greedy: a combination begins with an open pair; every other key takes the alternative that closes
// most open pairs with those chosen before it, equal ones in turn.
std::vector<std::vector<int>> pairwise(std::span<const int> counts,
                                       const std::function<bool(int, int, int, int)>& refuses) {
  const int keys = static_cast<int>(counts.size());
  const auto count = [&](int k) { return counts[static_cast<size_t>(k)]; };
  std::vector<std::vector<int>> combinations;
  if (keys < 2) {
    for (int i = 0; keys == 1 && i < count(0); ++i) combinations.push_back({i});
    return combinations;
  }
  Pairs pairs(counts, refuses);
  const auto complete = [&](int k0, int i0, int l0, int j0) {
    std::vector<int> chosen(static_cast<size_t>(keys), -1);
    const auto of = [&](int k) -> int& { return chosen[static_cast<size_t>(k)]; };
    of(k0) = i0;
    of(l0) = j0;
    for (int k = 0; k < keys; ++k) {
      if (of(k) >= 0) continue;
      int best = -1;
      int most = -1;
      for (int step = 0; step < count(k); ++step) {
        const int i = (step + static_cast<int>(combinations.size())) % count(k);
        int gain = 0;
        for (int l = 0; l < keys && gain >= 0; ++l) {
          if (of(l) < 0) continue;
          if (pairs.is_refused(k, i, l, of(l))) {
            gain = -1;
          } else if (pairs.is_open(k, i, l, of(l))) {
            ++gain;
          }
        }
        if (gain > most) {
          most = gain;
          best = i;
        }
      }
      if (best < 0) return false;
      of(k) = best;
    }
    for (int k = 0; k < keys; ++k) {
      for (int l = k + 1; l < keys; ++l) pairs.cover(k, of(k), l, of(l));
    }
    combinations.push_back(std::move(chosen));
    return true;
  };
  for (int k = 0; k < keys; ++k) {
    for (int l = k + 1; l < keys; ++l) {
      for (int i = 0; i < count(k); ++i) {
        for (int j = 0; j < count(l); ++j) {
          if (pairs.is_open(k, i, l, j) && !complete(k, i, l, j)) pairs.cover(k, i, l, j);
        }
      }
    }
  }
  return combinations;
}

}  // namespace ehc::cli
