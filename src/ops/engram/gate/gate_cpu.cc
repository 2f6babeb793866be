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

template <class A>
EHC_SIMD void prefetch_row(const GateRow<A>& row, int64_t i) {
  constexpr int64_t kAhead = 4096 / sizeof(A);
  simd::prefetch(row.residual + i + kAhead);
  simd::prefetch(row.key + i + kAhead);
}

// Writes `row` and returns the sums of `next`.
template <class A, bool kAdd, bool kStreaming>
inline GateSums write_and_sum(const OutRow<A>& row, const GateRow<A>& next, int64_t hidden) {
  GateSums sums;
  int64_t i = 0;
  for (; i + simd::kPair <= hidden; i += simd::kPair) {
    prefetch_row(next, i);
    gate_sum_columns(sums, next, i, i + simd::kPair);
    const Pair y = gated<A, kAdd>(row, i, simd::kPair);
    if constexpr (kStreaming) {
      simd::stream(row.out + i, y);
    } else {
      simd::store(row.out + i, y);
    }
  }
  if (const int64_t rest = hidden - i; rest > 0) {
    gate_sum_columns(sums, next, i, hidden);
    simd::store_tail(row.out + i, gated<A, kAdd>(row, i, rest), static_cast<int>(rest));
  }
  return sums;
}

// Walks over the (token, stream) rows of [begin, end), leaving out masked tokens.
struct Cursor {
  const GateForwardArgs& args;
  int64_t token, stream, end;

  Cursor(const GateForwardArgs& a, int64_t first, int64_t last)
      : args(a), token(first), stream(0), end(last) {
    skip_masked();
  }
  EHC_SIMD bool done() const { return token >= end; }
  EHC_SIMD void advance() {
    if (++stream < args.streams) return;
    stream = 0;
    ++token;
    skip_masked();
  }
  EHC_SIMD void skip_masked() {
    while (token < end && masked(args.image_token_mask, token)) ++token;
  }
  template <class A>
  EHC_SIMD GateRow<A> row() const {
    return {residual_row<A>(args, token, stream), key_row<A>(args, token, stream),
            args.weight_fused + stream * args.weight_stream_stride};
  }
};

template <class A, bool kAdd>
inline void gate_tokens(const GateForwardArgs& args, int64_t begin, int64_t end) {
  Cursor current(args, begin, end);
  if (current.done()) return;
  GateSums sums;
  gate_sum_columns(sums, current.row<A>(), 0, args.hidden);
  while (!current.done()) {
    const GateScalars scalars = gate_scalars(sums, args.hidden, args.eps, args.clamp);
    save(args, current.token, current.stream, scalars);
    const OutRow<A> row = {residual_row<A>(args, current.token, current.stream),
                           value_row<A>(args, current.token),
                           out_row<A>(args, current.token, current.stream), scalars.alpha};
    current.advance();
    // After the last row the sums are taken of the row just written from, and dropped.
    GateRow<A> next = {row.residual, row.residual, args.weight_fused};
    if (!current.done()) next = current.row<A>();
    sums = args.streaming && simd::can_stream(row.out)
               ? write_and_sum<A, kAdd, true>(row, next, args.hidden)
               : write_and_sum<A, kAdd, false>(row, next, args.hidden);
  }
}

template <class A>
inline void gate_statistics(const GateForwardArgs& args, int64_t begin, int64_t end) {
  for (Cursor at(args, begin, end); !at.done(); at.advance()) {
    GateSums sums;
    gate_sum_columns(sums, at.row<A>(), 0, args.hidden);
    save(args, at.token, at.stream, gate_scalars(sums, args.hidden, args.eps, args.clamp));
    if (at.stream == 0 && args.value_mean_square) {
      args.value_mean_square[at.token] = mean_square(value_row<A>(args, at.token), args.hidden);
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
