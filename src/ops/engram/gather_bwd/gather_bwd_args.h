// Arguments of the row sums.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"
#include "ehc/dtype.h"

namespace ehc::engram {

struct GatherBackwardArgs {
  int64_t columns;  // C
  int64_t width;    // hd
  DType type;       // bf16, f16 or f32
  const void* grad;
  int64_t grad_token_stride;

  bool wide;            // entries are RowEntry<uint64_t>, else uint32_t
  const void* entries;  // by row, then position
  int64_t entry_count;

  // Dense: a row has its own place in `out`. Else the next place belongs to the next row that is
  // named, and its number goes to unique_rows.
  bool dense;
  bool fill;            // dense: rows that no entry names are written too
  const float* target;  // added to the sums, or null; row r at r*target_stride
  int64_t target_stride;
  float* out;
  int64_t out_stride;
  void* unique_rows;
  bool unique_is_64;
  // Sums of chains, for rows of several: that of the chain that starts at entry i is [i/256,
  // width].
  float* partials;
  // Store past the caches where rows allow it; no bit depends on it.
  bool streaming;
};

// A part of the work: sums of the chains that start in these entries and, with `fill`, all other
// rows among these.
struct GatherBackwardSpan {
  int64_t first_entry, last_entry;
  int64_t first_row, last_row;
  int64_t first_unique;  // rows named by the entries before
};

// Sums chains. True when a row of several chains begins in the span: then it waits for the next.
EHC_CPU_KERNEL(bool sum_row_gradients(const GatherBackwardArgs& args,
                                      const GatherBackwardSpan& span));
// Adds up the chains of the rows that begin in the span and have several.
EHC_CPU_KERNEL(void add_row_chains(const GatherBackwardArgs& args, const GatherBackwardSpan& span));

}  // namespace ehc::engram
