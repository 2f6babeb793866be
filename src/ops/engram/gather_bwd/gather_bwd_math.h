// How the entries of a row are cut into chains: 256 each, the last one of up to 511, by the place
// in the row alone. So chains start at least 256 entries apart.
#pragma once

#include "core/host_device.h"
#include "ops/engram/shared/row_entry.h"

namespace ehc::engram {

inline constexpr int64_t kGradientChain = 256;

template <class Word>
EHC_HD bool begins_row(const RowEntry<Word>* entries, int64_t i) {
  return i == 0 || entries[i].row != entries[i - 1].row;
}

template <class Word>
EHC_HD bool same_row(const RowEntry<Word>* entries, int64_t count, int64_t i, int64_t j) {
  return j < count && entries[j].row == entries[i].row;
}

// The end of the chain that starts at entry i.
template <class Word>
EHC_HD int64_t chain_end(const RowEntry<Word>* entries, int64_t count, int64_t i) {
  if (same_row(entries, count, i, i + 2 * kGradientChain - 1)) return i + kGradientChain;
  int64_t end = i + 1;
  while (same_row(entries, count, i, end)) ++end;
  return end;
}

// The first entry from i on at which a chain starts.
template <class Word>
EHC_HD int64_t chain_start(const RowEntry<Word>* entries, int64_t count, int64_t i) {
  if (i >= count || begins_row(entries, i)) return i;
  int64_t low = 0, high = i - 1;  // the row begins in [low, high]
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (entries[middle].row == entries[i].row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const int64_t next = low + (i - low + kGradientChain - 1) / kGradientChain * kGradientChain;
  if (same_row(entries, count, i, next + kGradientChain - 1)) return next;
  while (same_row(entries, count, i - 1, i)) ++i;  // no chain starts in what is left of the row
  return i;
}

}  // namespace ehc::engram
