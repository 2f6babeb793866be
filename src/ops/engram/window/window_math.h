// One row of the window, and the sequence that a token is in.
#pragma once

#include "core/host_device.h"
#include "ops/engram/window/window_args.h"

namespace ehc::engram {

EHC_HD int64_t sequence_start(const WindowArgs& a, int64_t sequence) {
  return a.cu_seqlens != nullptr ? a.cu_seqlens[sequence] : 0;
}

EHC_HD int64_t sequence_end(const WindowArgs& a, int64_t sequence) {
  return a.cu_seqlens != nullptr ? a.cu_seqlens[sequence + 1] : a.tokens;
}

// The sequence of token t: the last one that starts at or before t. Empty ones are passed over.
EHC_HD int64_t sequence_of(const WindowArgs& a, int64_t t) {
  int64_t low = 0;
  int64_t high = a.sequences - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (sequence_start(a, middle) <= t) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Row t into `row`. `max_ngram` = a.max_ngram, as a constant where the caller has one.
EHC_HD void window_row(const WindowArgs& a, int32_t max_ngram, int64_t t, int64_t sequence,
                       int64_t start, int32_t* row) {
  bool behind = false;  // everything from here on is blocked
  for (int32_t k = 0; k < max_ngram; ++k) {
    const int64_t position = t - k;
    int32_t id = -1;
    if (position >= start) {
      if (a.mask == nullptr || a.mask[position] == 0) id = a.ids[position];
    } else if (a.history != nullptr) {
      id = a.history[(sequence + 1) * (max_ngram - 1) - (start - position)];
    }
    const bool blocked = behind || id < 0;
    row[k] = blocked ? a.pad_id : id;
    // reset_id = -1 equals no id that is shown.
    behind = behind || (blocked && a.farther) || (k > 0 && !blocked && id == a.reset_id);
  }
}

}  // namespace ehc::engram
