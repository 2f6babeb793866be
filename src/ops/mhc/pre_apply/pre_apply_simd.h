// Vector steps of pre_apply, shared by all operators that collapse the streams.
#pragma once

#include "ops/mhc/shared/stream_rows_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

// sum_i pre_i x_i for a pair of columns; ascending i from +0.
template <int kStreams>
EHC_SIMD simd::Pair pre_apply_pair(const float* pre, const simd::Pair* x, int64_t streams) {
  simd::Pair sum = simd::zero_pair();
  for (int64_t i = 0; i < count_of<kStreams>(streams); ++i) {
    sum = fma(simd::splat(pre[i]), x[i], sum);
  }
  return sum;
}

// The pair of columns of every stream that starts at `column`, of which `count` exist.
template <int kStreams, class A>
EHC_SIMD void load_streams(const TokenRows<const A>& rows, int64_t streams, int64_t column,
                           int64_t count, simd::Pair* x) {
  for (int64_t i = 0; i < count_of<kStreams>(streams); ++i) {
    x[i] = simd::load_some(rows[i] + column, count);
  }
}

template <int kStreams, class A>
EHC_SIMD void prefetch_streams(const TokenRows<const A>& rows, int64_t streams, int64_t column) {
  for (int64_t i = 0; i < count_of<kStreams>(streams); ++i) simd::prefetch(rows[i] + column);
}

// Columns [begin, end) of a token: out = round(sum_i pre_i x_i). Calls prefetch(column) for each
// pair.
template <int kStreams, class A, class Prefetch>
inline void pre_apply_columns(const float* pre, const TokenRows<const A>& x, A* out,
                              int64_t streams, int64_t begin, int64_t end, bool streaming,
                              const Prefetch& prefetch) {
  simd::Pair at[kMaxStreams];
  int64_t column = begin;
  for (; column + simd::kPair <= end; column += simd::kPair) {
    prefetch(column);
    load_streams<kStreams>(x, streams, column, simd::kPair, at);
    simd::store_some(out + column, pre_apply_pair<kStreams>(pre, at, streams), simd::kPair,
                     streaming);
  }
  if (column < end) {
    load_streams<kStreams>(x, streams, column, end - column, at);
    simd::store_some(out + column, pre_apply_pair<kStreams>(pre, at, streams), end - column, false);
  }
}

}  // namespace
}  // namespace ehc::mhc::EHC_ISA
