// Vector steps of post, shared by all operators that make new streams.
#pragma once

#include "ops/mhc/pre_apply/pre_apply_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

// Stream o of the new ones, c_o y + sum_i a_io b_i, for a pair of columns: the rounded product
// first, then ascending i. `comb` is [i,o] side by side.
template <int kStreams>
EHC_SIMD simd::Pair post_pair(const float* post, const float* comb, int64_t streams, int64_t o,
                              simd::Pair y, const simd::Pair* x) {
  const int64_t count = count_of<kStreams>(streams);
  simd::Pair sum = mul(y, simd::splat(post[o]));
  for (int64_t i = 0; i < count; ++i) sum = fma(simd::splat(comb[i * count + o]), x[i], sum);
  return sum;
}

// What post reads of a token.
template <class A>
struct PostRows {
  const A* layer_output;
  TokenRows<const A> residual;
};

template <int kStreams, class A, class Use, class Store>
EHC_SIMD void post_columns_at(const float* post, const float* comb, const PostRows<A>& rows,
                              int64_t streams, int64_t column, int64_t count, const Use& use,
                              const Store& store) {
  simd::Pair x[kMaxStreams];
  load_streams<kStreams>(rows.residual, streams, column, count, x);
  const simd::Pair y = simd::load_some(rows.layer_output + column, count);
  use(column, count, x);
  for (int64_t o = 0; o < count_of<kStreams>(streams); ++o) {
    store(column, count, o, post_pair<kStreams>(post, comb, streams, o, y, x));
  }
}

// Columns [begin, end) of a token, a pair of them at a time, of which `count` exist. Calls
// prefetch(column) where all of them do, use(column, count, streams of the residual), and
// store(column, count, stream, pair) for each new stream, which may store where the residual was:
// all of it has been read there.
template <int kStreams, class A, class Prefetch, class Use, class Store>
inline void post_columns(const float* post, const float* comb, const PostRows<A>& rows,
                         int64_t streams, int64_t begin, int64_t end, const Prefetch& prefetch,
                         const Use& use, const Store& store) {
  int64_t column = begin;
  for (; column + simd::kPair <= end; column += simd::kPair) {
    prefetch(column);
    post_columns_at<kStreams>(post, comb, rows, streams, column, simd::kPair, use, store);
  }
  if (column < end) {
    post_columns_at<kStreams>(post, comb, rows, streams, column, end - column, use, store);
  }
}

}  // namespace
}  // namespace ehc::mhc::EHC_ISA
