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

template <int kStreams, class A>
EHC_SIMD void post_columns_at(const float* post, const float* comb, const PostRows<A>& rows,
                              const TokenRows<A>& out, int64_t streams, int64_t column,
                              int64_t count, bool streaming) {
  simd::Pair x[kMaxStreams];
  load_streams<kStreams>(rows.residual, streams, column, count, x);
  const simd::Pair y = simd::load_some(rows.layer_output + column, count);
  for (int64_t o = 0; o < count_of<kStreams>(streams); ++o) {
    simd::store_some(out[o] + column, post_pair<kStreams>(post, comb, streams, o, y, x), count,
                     streaming);
  }
}

// Columns [begin, end) of a token. Each pair is read whole before it is written: `out` may be the
// residual. Prefetches the same columns of `soon`.
template <int kStreams, class A>
inline void post_columns(const float* post, const float* comb, const PostRows<A>& rows,
                         const TokenRows<A>& out, const PostRows<A>& soon, int64_t streams,
                         int64_t begin, int64_t end, bool streaming) {
  int64_t column = begin;
  for (; column + simd::kPair <= end; column += simd::kPair) {
    simd::prefetch(soon.layer_output + column);
    for (int64_t i = 0; i < count_of<kStreams>(streams); ++i) {
      simd::prefetch(soon.residual[i] + column);
    }
    post_columns_at<kStreams>(post, comb, rows, out, streams, column, simd::kPair, streaming);
  }
  if (column < end) {
    post_columns_at<kStreams>(post, comb, rows, out, streams, column, end - column, false);
  }
}

}  // namespace
}  // namespace ehc::mhc::EHC_ISA
