// engram.gate_fwd on SIMD lanes.
//
//   alpha[t,h] = sigmoid(signed_root(D * rx * rk / sqrt(d))), out[t,h,:] = round(x + alpha * v)
//   x, k, out A[T,n,d]; v A[T,d]; wf F32[n,d]
//
// Bytes: (6n+2)d a token in 16-bit types: x, k, v read once, out written once.
// Algorithm: one loop over d writes the output of a stream, whose x row was just read, and takes
// the sums of the next stream, so that reads and writes of memory stay mixed. Class R per
// implementation and batch-invariant: lanes depend on the column alone.
#include "ops/engram/gate/gate_simd.h"

namespace ehc::engram::EHC_ISA {
namespace {

using simd::Pair;

// Output row in the making: its sums are complete.
template <class A>
struct OutRow {
  const A* residual;
  const A* value;
  A* out;
  float alpha;
};

template <class A, bool kAdd>
EHC_SIMD Pair gated(const OutRow<A>& row, int64_t i, int64_t count) {
  const Pair v = simd::load_some(row.value + i, count);
  const simd::Vec alpha = simd::splat(row.alpha);
  if constexpr (kAdd) return fma(alpha, v, simd::load_some(row.residual + i, count));
  return mul(v, alpha);
}

// Writes `row`, returns the sums of `next` and prefetches `soon`.
template <class A, bool kAdd, bool kStreaming>
inline GateSums write_and_sum(const OutRow<A>& row, const GateRow<A>& next, const GateRow<A>& soon,
                              int64_t hidden) {
  GateSums sums;
  int64_t i = 0;
  for (; i + simd::kPair <= hidden; i += simd::kPair) {
    simd::prefetch(soon.residual + i);
    simd::prefetch(soon.key + i);
    gate_sum_pair(sums, next, i, simd::kPair);
    const Pair y = gated<A, kAdd>(row, i, simd::kPair);
    if constexpr (kStreaming) {
      simd::stream(row.out + i, y);
    } else {
      simd::store(row.out + i, y);
    }
  }
  if (const int64_t rest = hidden - i; rest > 0) {
    gate_sum_pair(sums, next, i, rest);
    simd::store_tail(row.out + i, gated<A, kAdd>(row, i, rest), static_cast<int>(rest));
  }
  return sums;
}

// Walks over the (token, stream) rows of [begin, end), leaving out masked tokens: blocks of tokens,
// in a block stream by stream, so that a row of wf is used for a whole block.
class Cursor {
 public:
  Cursor(const GateForwardArgs& args, int64_t begin, int64_t end) : args_(args), end_(end) {
    open_block(begin);
    settle();
  }
  EHC_SIMD bool done() const { return begin_ >= end_; }
  EHC_SIMD int64_t token() const { return token_; }
  EHC_SIMD int64_t stream() const { return stream_; }
  EHC_SIMD void advance() {
    ++token_;
    settle();
  }
  template <class A>
  EHC_SIMD GateRow<A> row() const {
    return gate_row<A>(args_, token_, stream_);
  }

 private:
  static constexpr int64_t kBlock = 16;

  EHC_SIMD void open_block(int64_t begin) {
    token_ = begin_ = begin;
    block_end_ = begin + kBlock < end_ ? begin + kBlock : end_;
    stream_ = 0;
  }
  // Moves forward to a token that is not masked.
  EHC_SIMD void settle() {
    while (!done()) {
      while (token_ < block_end_ && masked(args_.image_token_mask, token_)) ++token_;
      if (token_ < block_end_) return;
      token_ = begin_;
      if (++stream_ == args_.streams) open_block(block_end_);
    }
  }

  const GateForwardArgs& args_;
  int64_t end_, begin_ = 0, block_end_ = 0, token_ = 0, stream_ = 0;
};

template <class A, bool kAdd>
inline void gate_tokens(const GateForwardArgs& args, int64_t begin, int64_t end) {
  Cursor current(args, begin, end);
  if (current.done()) return;
  GateSums sums = gate_sum_row(current.row<A>(), args.hidden);
  while (!current.done()) {
    const int64_t token = current.token(), stream = current.stream();
    const GateScalars scalars =
        gate_scalars(sums, current.row<A>(), args.hidden, args.eps, args.clamp);
    save(args, token, stream, scalars);
    const OutRow<A> row = {residual_row<A>(args, token, stream), value_row<A>(args, token),
                           out_row<A>(args, token, stream), scalars.alpha};
    // Behind the last row the sums are taken of any row, and dropped.
    GateRow<A> next = {row.residual, row.residual, args.weight_fused};
    current.advance();
    if (!current.done()) next = current.row<A>();
    GateRow<A> soon = next;
    if (Cursor after = current; !after.done()) {
      after.advance();
      if (!after.done()) soon = after.row<A>();
    }
    sums = args.streaming && simd::can_stream(row.out)
               ? write_and_sum<A, kAdd, true>(row, next, soon, args.hidden)
               : write_and_sum<A, kAdd, false>(row, next, soon, args.hidden);
  }
}

template <class A>
inline void gate_statistics(const GateForwardArgs& args, int64_t begin, int64_t end) {
  for (Cursor at(args, begin, end); !at.done(); at.advance()) {
    const GateRow<A> row = at.row<A>();
    save(args, at.token(), at.stream(),
         gate_scalars(gate_sum_row(row, args.hidden), row, args.hidden, args.eps, args.clamp));
    if (at.stream() == 0 && args.value_mean_square) {
      args.value_mean_square[at.token()] = mean_square(value_row<A>(args, at.token()), args.hidden);
    }
  }
}

template <class A>
inline void gate_range(const GateForwardArgs& args, int64_t begin, int64_t end) {
  if (args.image_token_mask) {
    for (int64_t t = begin; t < end; ++t) {
      if (args.image_token_mask[t]) gate_masked_token<A>(args, t);
    }
  }
  if (args.mode == GateMode::add) {
    gate_tokens<A, true>(args, begin, end);
  } else if (args.mode == GateMode::value) {
    gate_tokens<A, false>(args, begin, end);
  } else {
    gate_statistics<A>(args, begin, end);
  }
  if (args.streaming) simd::stream_fence();
}

}  // namespace

void gate_fwd_rows(const GateForwardArgs& args, int64_t begin, int64_t end) {
  switch (args.activation) {
    case DType::bf16:
      return gate_range<simd::Bf16>(args, begin, end);
    case DType::f16:
      return gate_range<simd::F16>(args, begin, end);
    default:
      return gate_range<float>(args, begin, end);
  }
}

}  // namespace ehc::engram::EHC_ISA
