// engram.gather_bwd: grad_table[r] (+)= sum of grad[t, c*hd:(c+1)*hd] over (t,c) with index r.
// grad A[T,C*hd], entries (row, t*C + c) ordered by row and position, grad_table F32[rows,hd]
//
// Bytes: grad and the entries once, every output row once.
// Each row has one writer, which adds its summands in ascending position: no atomics. Rows that are
// named very often are summed in chains of 256 by several threads. A column's sum stays in one
// lane, so the bits are the same for every instruction set. Summands are prefetched kAhead entries
// early. Class R.
#include "backends/cpu/simd.h"
#include "ops/engram/gather_bwd/gather_bwd_args.h"
#include "ops/engram/gather_bwd/gather_bwd_math.h"

namespace ehc::engram::EHC_ISA {
namespace {

namespace simd = ehc::simd::EHC_ISA;
using simd::kPair;
using simd::Pair;

constexpr int64_t kTilePairs = 4;
constexpr int64_t kAhead = 16;

template <class A>
EHC_SIMD const A* summand(const GatherBackwardArgs& a, uint64_t at) {
  const auto columns = static_cast<uint64_t>(a.columns);
  if (a.grad_token_stride == a.columns * a.width) {
    return static_cast<const A*>(a.grad) + static_cast<int64_t>(at) * a.width;
  }
  return static_cast<const A*>(a.grad) + static_cast<int64_t>(at / columns) * a.grad_token_stride +
         static_cast<int64_t>(at % columns) * a.width;
}

// Where a sum goes.
struct Sink {
  float* to;
  const float* target;  // or null
  bool streaming;
};

EHC_SIMD void finish(const Sink& sink, int64_t i, Pair sum, int64_t rest) {
  if (sink.target != nullptr) sum = add(simd::load_some(sink.target + i, rest), sum);
  simd::store_some(sink.to + i, sum, rest, sink.streaming);
}

// Columns [column, column + rest), at most kPairs pairs of them; kWhole: exactly so many.
template <class A, int kPairs, bool kWhole, class Word>
EHC_SIMD void sum_tile(const GatherBackwardArgs& a, const RowEntry<Word>* entries, int64_t begin,
                       int64_t end, int64_t column, int64_t rest, const Sink& sink) {
  Pair sum[kPairs];
  for (Pair& pair : sum) pair = simd::zero_pair();
  for (int64_t i = begin; i < end; ++i) {
    const A* row = summand<A>(a, entries[i].at) + column;
#pragma GCC unroll 4
    for (int64_t p = 0; p < kPairs; ++p) {
      const Pair x = kWhole || p + 1 < kPairs ? simd::load(row + p * kPair)
                                              : simd::load_some(row + p * kPair, rest - p * kPair);
      sum[p] = add(sum[p], x);
    }
  }
#pragma GCC unroll 4
  for (int64_t p = 0; p < kPairs; ++p) {
    const int64_t left = kWhole ? kPair : rest - p * kPair;
    finish(sink, column + p * kPair, simd::natural_order<A>(sum[p]), left);
  }
}

template <class A, bool kWhole, class Word>
EHC_SIMD void sum_columns(const GatherBackwardArgs& a, const RowEntry<Word>* entries, int64_t begin,
                          int64_t end, int64_t column, int64_t rest, const Sink& sink) {
  switch ((rest + kPair - 1) / kPair) {
    case 1:
      return sum_tile<A, 1, kWhole>(a, entries, begin, end, column, rest, sink);
    case 2:
      return sum_tile<A, 2, kWhole>(a, entries, begin, end, column, rest, sink);
    case 3:
      return sum_tile<A, 3, kWhole>(a, entries, begin, end, column, rest, sink);
    default:
      return sum_tile<A, 4, kWhole>(a, entries, begin, end, column, rest, sink);
  }
}

template <class A, class Word>
inline void sum_chain(const GatherBackwardArgs& a, const RowEntry<Word>* entries, int64_t begin,
                      int64_t end, const Sink& sink) {
  constexpr int64_t kLine = 64 / sizeof(A), kLines = 16;
  for (int64_t i = begin + kAhead; i < end + kAhead && i < a.entry_count; ++i) {
    const A* row = summand<A>(a, entries[i].at);
    for (int64_t k = 0; k < a.width && k < kLines * kLine; k += kLine) simd::prefetch(row + k);
  }
  for (int64_t column = 0; column < a.width; column += kTilePairs * kPair) {
    const int64_t left = a.width - column;
    const int64_t rest = left < kTilePairs * kPair ? left : kTilePairs * kPair;
    if (rest % kPair == 0) {
      sum_columns<A, true>(a, entries, begin, end, column, rest, sink);
    } else {
      sum_columns<A, false>(a, entries, begin, end, column, rest, sink);
    }
  }
}

Sink sink_of_row(const GatherBackwardArgs& a, int64_t row, int64_t unique) {
  float* to = a.out + (a.dense ? row : unique) * a.out_stride;
  const float* target = a.target == nullptr ? nullptr : a.target + row * a.target_stride;
  return {to, target, a.streaming && simd::can_stream(to)};
}

// Rows that no entry names.
void fill_rows(const GatherBackwardArgs& a, int64_t begin, int64_t end) {
  if (!a.fill) return;
  for (int64_t row = begin; row < end; ++row) {
    const Sink sink = sink_of_row(a, row, 0);
    for (int64_t i = 0; i < a.width; i += kPair) {
      const int64_t rest = a.width - i;
      const Pair x =
          sink.target == nullptr ? simd::zero_pair() : simd::load_some(sink.target + i, rest);
      simd::store_some(sink.to + i, x, rest, sink.streaming);
    }
  }
}

void store_unique(const GatherBackwardArgs& a, int64_t unique, int64_t row) {
  if (a.unique_is_64) {
    static_cast<int64_t*>(a.unique_rows)[unique] = row;
  } else {
    static_cast<int32_t*>(a.unique_rows)[unique] = static_cast<int32_t>(row);
  }
}

template <class A, class Word>
bool sum_span(const GatherBackwardArgs& a, const GatherBackwardSpan& span) {
  const auto* entries = static_cast<const RowEntry<Word>*>(a.entries);
  const int64_t count = a.entry_count;
  int64_t next_row = span.first_row;
  int64_t unique = span.first_unique;
  bool waits = false;
  for (int64_t i = chain_start(entries, count, span.first_entry), end; i < span.last_entry;
       i = end) {
    end = chain_end(entries, count, i);
    const auto row = static_cast<int64_t>(entries[i].row);
    const bool first = begins_row(entries, i);
    const bool last = !same_row(entries, count, i, end);
    Sink sink = {a.partials + i / kGradientChain * a.width, nullptr, false};
    if (first) {
      fill_rows(a, next_row, row);
      next_row = row + 1;
      if (!a.dense) store_unique(a, unique, row);
      if (last) sink = sink_of_row(a, row, unique);
      ++unique;
      waits = waits || !last;
    }
    sum_chain<A>(a, entries, i, end, sink);
  }
  // The entries of the last row may be the first ones of the next span.
  const bool named = span.last_entry < count &&
                     static_cast<int64_t>(entries[span.last_entry].row) == span.last_row - 1;
  fill_rows(a, next_row, named ? span.last_row - 1 : span.last_row);
  if (a.streaming) simd::stream_fence();
  return waits;
}

// `count` sums of chains, added in chains of their own.
void add_chains(const float* partials, int64_t count, int64_t width, const Sink& sink) {
  for (int64_t i = 0; i < width; i += kPair) {
    const int64_t rest = width - i;
    Pair total = simd::zero_pair();
    for (int64_t begin = 0, end; begin < count; begin = end) {
      end = begin + 2 * kGradientChain <= count ? begin + kGradientChain : count;
      Pair chain = simd::zero_pair();
      for (int64_t k = begin; k < end; ++k) {
        chain = add(chain, simd::load_some(partials + k * width + i, rest));
      }
      total = add(total, chain);
    }
    finish(sink, i, total, rest);
  }
}

template <class Word>
void add_span(const GatherBackwardArgs& a, const GatherBackwardSpan& span) {
  const auto* entries = static_cast<const RowEntry<Word>*>(a.entries);
  const int64_t count = a.entry_count;
  int64_t unique = span.first_unique;
  for (int64_t i = span.first_entry; i < span.last_entry; ++i) {
    if (!begins_row(entries, i)) continue;
    int64_t chains = 1;
    for (int64_t end = i; same_row(entries, count, i, end + 2 * kGradientChain - 1); ++chains) {
      end += kGradientChain;
    }
    if (chains > 1) {
      add_chains(a.partials + i / kGradientChain * a.width, chains, a.width,
                 sink_of_row(a, static_cast<int64_t>(entries[i].row), unique));
    }
    ++unique;
  }
  if (a.streaming) simd::stream_fence();
}

}  // namespace

bool sum_row_gradients(const GatherBackwardArgs& a, const GatherBackwardSpan& span) {
  bool waits = false;
  simd::with_activation(a.type, [&](auto type) {
    using A = decltype(type);
    waits = a.wide ? sum_span<A, uint64_t>(a, span) : sum_span<A, uint32_t>(a, span);
  });
  return waits;
}

void add_row_chains(const GatherBackwardArgs& a, const GatherBackwardSpan& span) {
  if (a.wide) {
    add_span<uint64_t>(a, span);
  } else {
    add_span<uint32_t>(a, span);
  }
}

}  // namespace ehc::engram::EHC_ISA
