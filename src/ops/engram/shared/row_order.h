// Positions of indices, ordered by the row that they name: a stable radix sort in workspace memory,
// on the threads of a context. A stable order is unique, so no bit depends on their number.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "core/parallel.h"
#include "core/workspace.h"
#include "ops/engram/shared/row_entry.h"
#include "ops/engram/shared/row_indices.h"

namespace ehc::engram {

template <class Word>
class RowOrder {
 public:
  RowOrder(const Context& context, int64_t tokens, int64_t columns, int64_t rows)
      : columns_(columns), all_(context, tokens * columns, kGrain) {
    const auto largest = static_cast<uint64_t>(std::max<int64_t>(rows, 2) - 1);
    const auto bits = static_cast<int>(std::bit_width(largest));
    passes_ = (bits + kMostBits - 1) / kMostBits;
    digit_bits_ = (bits + passes_ - 1) / passes_;
  }

  void place(Workspace& workspace) {
    for (RowEntry<Word>*& entries : entries_) entries = workspace.take<RowEntry<Word>>(all_.total);
    counts_ = workspace.take<int64_t>(all_.count << digit_bits_);
  }

  // The entries of all indices but -1; `count` receives their number. Afterwards the other half of
  // the memory is free.
  const RowEntry<Word>* sort(Context& context, const RowIndices& indices, int64_t& count) const {
    const auto from_indices = [&](int64_t begin, int64_t end, const auto& body) {
      if (begin == end) return;
      RowCursor at = {begin / columns_, begin % columns_, columns_};
      for (int64_t i = begin; i < end; ++i, at.advance()) {
        const int64_t row = row_index(indices, at.token, at.column);
        if (row >= 0) body(RowEntry<Word>{static_cast<Word>(row), static_cast<Word>(i)});
      }
    };
    count = distribute(context, all_, 0, from_indices, entries_[0]);
    const Pieces pieces(context, count, kGrain);
    int from = 0;
    for (int pass = 1; pass < passes_; ++pass, from ^= 1) {
      const auto from_entries = [&](int64_t begin, int64_t end, const auto& body) {
        for (int64_t i = begin; i < end; ++i) body(entries_[from][i]);
      };
      distribute(context, pieces, pass * digit_bits_, from_entries, entries_[from ^ 1]);
    }
    return entries_[from];
  }

 private:
  static constexpr int kMostBits = 11;  // so many streams are written at once
  static constexpr int64_t kGrain = 8192;

  // Writes the entries that `each(begin, end, body)` yields ordered by one digit; their number.
  template <class Each>
  int64_t distribute(Context& context, const Pieces& pieces, int shift, const Each& each,
                     RowEntry<Word>* to) const {
    const int64_t digits = int64_t{1} << digit_bits_;
    const Word mask = static_cast<Word>(digits - 1);
    std::memset(counts_, 0, static_cast<size_t>(pieces.count * digits) * sizeof *counts_);
    pieces.run(context, [&](int64_t piece, int64_t begin, int64_t end) {
      int64_t* counts = counts_ + piece * digits;
      each(begin, end, [&](RowEntry<Word> entry) { ++counts[entry.row >> shift & mask]; });
    });
    int64_t total = 0;
    for (int64_t digit = 0; digit < digits; ++digit) {
      for (int64_t piece = 0; piece < pieces.count; ++piece) {
        int64_t& place = counts_[piece * digits + digit];
        total += std::exchange(place, total);
      }
    }
    pieces.run(context, [&](int64_t piece, int64_t begin, int64_t end) {
      int64_t* places = counts_ + piece * digits;
      each(begin, end,
           [&](RowEntry<Word> entry) { to[places[entry.row >> shift & mask]++] = entry; });
    });
    return total;
  }

  int64_t columns_;
  Pieces all_;
  int passes_;
  int digit_bits_;
  RowEntry<Word>* entries_[2] = {};
  int64_t* counts_ = nullptr;
};

}  // namespace ehc::engram
