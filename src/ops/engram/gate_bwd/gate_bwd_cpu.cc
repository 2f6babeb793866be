// engram.gate_bwd on SIMD lanes.
//
//   grad_x = round(go + slope * (k * wf - x * D rx^2/d))
//   grad_k = round(slope * (x * wf - k * D rk^2/d))
//   grad_v = round(sum_h alpha * gp), grad_wf = sum_t slope * x * k
//   go, gp, x, k, grad_x, grad_k A[T,n,d]; v, grad_v A[T,d]; wf, grad_wf F32[n,d]
//
// Bytes: (10n+4)d a token in 16-bit types, 16n of statistics.
// Algorithm: tokens in groups. First what needs whole rows: the statistics, unless saved, then in
// one pass over gp grad_alpha and grad_v. The second pass takes a stream of all tokens of a group
// together, so that wf and grad_wf are read once a group. Rows of the group stay in the
// second-level cache between the passes; each pass prefetches what the next one reads. grad_wf is
// summed in token order, whatever the groups. Class R per implementation; tokens are independent.
#include "ops/engram/gate_bwd/gate_bwd_args.h"
#include "ops/engram/gate_bwd/gate_bwd_simd.h"

namespace ehc::engram::EHC_ISA {
namespace {

using simd::kPair;
using simd::Pair;

inline constexpr int kGroup = 4;
inline constexpr int kMaxStreams = 8;
inline constexpr int kTilePairs = 4;

// Up to kGroup tokens that are not masked, in order.
struct Group {
  int64_t token[kGroup];
  int size = 0;
};

// Finds the groups of a chunk.
class GroupCursor {
 public:
  GroupCursor(const uint8_t* mask, int64_t begin, int64_t end)
      : mask_(mask), token_(begin), end_(end) {}
  Group next() {
    Group group;
    for (; token_ < end_ && group.size < kGroup; ++token_) {
      if (!masked(mask_, token_)) group.token[group.size++] = token_;
    }
    return group;
  }

 private:
  const uint8_t* mask_;
  int64_t token_, end_;
};

EHC_SIMD float load(const StreamStatistic& from, int64_t token, int64_t stream) {
  return from.data[token * from.token_stride + stream];
}

template <class A>
inline GateScalars gate_of(const GateForwardArgs& gate, int64_t token, int64_t stream) {
  if (gate.dot.data) {
    return {load(gate.dot, token, stream), load(gate.alpha, token, stream),
            load(gate.rstd_residual, token, stream), load(gate.rstd_key, token, stream)};
  }
  const GateRow<A> row = gate_row<A>(gate, token, stream);
  return gate_scalars(gate_sum_row(row, gate.hidden), row, gate.hidden, gate.eps, gate.clamp);
}

// The columns of a tile: kPairs pairs, of which the last has `count` columns.
template <class A, int kPairs>
EHC_SIMD void value_tile(const GateBackwardArgs& args, int64_t token, const GateScalars* gates,
                         int64_t column, int64_t count, Pair* grad_alpha) {
  const A* value = value_row<A>(args.gate, token) + column;
  A* grad_value = gradient_row<A>(args.grad_value, token, 0) + column;
  const auto columns = [&](int p) EHC_SIMD_LAMBDA { return p + 1 < kPairs ? kPair : count; };
  Pair v[kPairs], sum[kPairs];
  for (int p = 0; p < kPairs; ++p) v[p] = simd::load_some(value + p * kPair, columns(p));
  for (int p = 0; p < kPairs; ++p) sum[p] = simd::zero_pair();
  for (int64_t h = 0; h < args.gate.streams; ++h) {
    const A* grad_row = gradient_row<A>(args.grad_value_path, token, h) + column;
    Pair of_alpha = grad_alpha[h];
    for (int p = 0; p < kPairs; ++p) {
      const Pair grad = simd::load_some(grad_row + p * kPair, columns(p));
      of_alpha = add_grad_alpha(of_alpha, grad, v[p]);
      sum[p] = add_grad_value(sum[p], gates[h].alpha, grad);
    }
    grad_alpha[h] = of_alpha;
  }
  for (int p = 0; p < kPairs; ++p) {
    simd::store_some(grad_value + p * kPair, sum[p], columns(p), false);
  }
}

// Writes grad_value of a token, gives the slopes of its streams.
template <class A>
inline void value_path(const GateBackwardArgs& args, int64_t token, GateSlopes* slopes) {
  const GateForwardArgs& gate = args.gate;
  GateScalars gates[kMaxStreams];
  Pair grad_alpha[kMaxStreams];
  for (int64_t h = 0; h < gate.streams; ++h) {
    gates[h] = gate_of<A>(gate, token, h);
    grad_alpha[h] = simd::zero_pair();
  }
  int64_t i = 0;
  for (; i + kTilePairs * kPair <= gate.hidden; i += kTilePairs * kPair) {
    value_tile<A, kTilePairs>(args, token, gates, i, kPair, grad_alpha);
  }
  for (; i < gate.hidden; i += kPair) {
    value_tile<A, 1>(args, token, gates, i, gate.hidden - i, grad_alpha);
  }
  for (int64_t h = 0; h < gate.streams; ++h) {
    slopes[h] = gate_slopes(reduce_add(grad_alpha[h]), gates[h], gate.hidden, gate.clamp);
  }
}

// One stream of a token in the second pass.
template <class A>
struct StreamRow {
  const A *grad, *residual, *key;
  A *grad_residual, *grad_key;
  GateSlopes slopes;
};

// Where the sum of a chunk stands, and whether anything was added yet.
struct WeightSum {
  const float* weight;
  float* grad;
  bool first;
};

// Rows that are read soon.
template <class A>
struct SoonRows {
  static constexpr int kRows = 3 * kGroup;
  const A* row[kRows];

  EHC_SIMD void prefetch(int64_t i) const {
    for (int r = 0; r < kRows; ++r) simd::prefetch(row[r] + i);
  }
};

template <class A, int kTokens>
EHC_SIMD void gradient_pair(const StreamRow<A>* rows, const WeightSum& sum, int64_t i,
                            int64_t count, bool streaming) {
  const Pair weight = simd::load_f32_some<A>(sum.weight + i, count);
  Pair grad_weight = sum.first ? simd::zero_pair() : simd::load_f32_some<A>(sum.grad + i, count);
  for (int t = 0; t < kTokens; ++t) {
    const StreamRow<A>& at = rows[t];
    const GateGradient grad = gate_gradient(
        at.slopes, simd::load_some(at.grad + i, count), simd::load_some(at.residual + i, count),
        simd::load_some(at.key + i, count), weight, grad_weight);
    simd::store_some(at.grad_residual + i, grad.residual, count, streaming);
    simd::store_some(at.grad_key + i, grad.key, count, streaming);
  }
  simd::store_some(sum.grad + i, simd::natural_order<A>(grad_weight), count, false);
}

template <class A, int kTokens, bool kStreaming>
inline void gradient_rows(const StreamRow<A>* rows, const WeightSum& sum, const SoonRows<A>& soon,
                          int64_t hidden) {
  int64_t i = 0;
  for (; i + kPair <= hidden; i += kPair) {
    if constexpr (kTokens == kGroup) soon.prefetch(i);
    gradient_pair<A, kTokens>(rows, sum, i, kPair, kStreaming);
  }
  if (i < hidden) gradient_pair<A, kTokens>(rows, sum, i, hidden - i, false);
}

template <class A>
inline void zero_row(A* row, int64_t hidden) {
  std::memset(row, 0, static_cast<size_t>(hidden) * sizeof(A));
}

// While a stream of a group is worked on: its keys and streams to come, and of the next group what
// the first pass reads.
template <class A>
EHC_SIMD SoonRows<A> soon_rows(const GateBackwardArgs& args, const Group& group, const Group& next,
                               int64_t stream) {
  const GateForwardArgs& gate = args.gate;
  const Group& ahead = next.size == kGroup ? next : group;
  const bool recompute = gate.dot.data == nullptr;
  const bool last = stream + 1 == gate.streams;
  const Group& of_rows = recompute || last ? ahead : group;
  const int64_t stream_of_rows = recompute ? stream : last ? 0 : stream + 1;
  SoonRows<A> soon;
  for (int t = 0; t < kGroup; ++t) {
    soon.row[3 * t] = gradient_row<A>(args.grad_value_path, ahead.token[t], stream);
    soon.row[3 * t + 1] = residual_row<A>(gate, of_rows.token[t], stream_of_rows);
    soon.row[3 * t + 2] = key_row<A>(gate, of_rows.token[t], stream_of_rows);
  }
  return soon;
}

template <class A, bool kStreaming>
inline void group_gradients(const GateBackwardArgs& args, const Group& group, const Group& next,
                            const GradWeightRows& grad_weight, bool first) {
  const GateForwardArgs& gate = args.gate;
  GateSlopes slopes[kGroup][kMaxStreams];
  for (int t = 0; t < group.size; ++t) value_path<A>(args, group.token[t], slopes[t]);
  for (int64_t h = 0; h < gate.streams; ++h) {
    StreamRow<A> rows[kGroup];
    for (int t = 0; t < group.size; ++t) {
      const int64_t token = group.token[t];
      rows[t] = {gradient_row<A>(args.grad_out, token, h),
                 residual_row<A>(gate, token, h),
                 key_row<A>(gate, token, h),
                 gradient_row<A>(args.grad_residual, token, h),
                 gradient_row<A>(args.grad_key, token, h),
                 slopes[t][h]};
    }
    WeightSum sum = {gate.weight_fused + h * gate.weight_stream_stride,
                     grad_weight.data + h * grad_weight.stream_stride, first};
    if (group.size == kGroup) {
      const SoonRows<A> soon = soon_rows<A>(args, group, next, h);
      gradient_rows<A, kGroup, kStreaming>(rows, sum, soon, gate.hidden);
      continue;
    }
    for (int t = 0; t < group.size; ++t) {
      gradient_rows<A, 1, kStreaming>(rows + t, sum, {}, gate.hidden);
      sum.first = false;
    }
  }
}

template <class A, bool kStreaming>
inline void group_after_group(const GateBackwardArgs& args, int64_t begin, int64_t end,
                              const GradWeightRows& grad_weight) {
  GroupCursor cursor(args.gate.image_token_mask, begin, end);
  Group group = cursor.next();
  if (group.size == 0) {
    for (int64_t h = 0; h < args.gate.streams; ++h) {
      zero_row(grad_weight.data + h * grad_weight.stream_stride, args.gate.hidden);
    }
  }
  for (bool first = true; group.size > 0; first = false) {
    const Group next = cursor.next();
    group_gradients<A, kStreaming>(args, group, next, grad_weight, first);
    group = next;
  }
}

template <class A>
inline void chunk_gradients(const GateBackwardArgs& args, int64_t begin, int64_t end,
                            const GradWeightRows& grad_weight) {
  for (int64_t t = begin; t < end; ++t) {
    if (masked(args.gate.image_token_mask, t)) write_image_token<A>(args, t);
  }
  if (args.streaming && can_stream<A>(args.grad_residual) && can_stream<A>(args.grad_key)) {
    group_after_group<A, true>(args, begin, end, grad_weight);
    simd::stream_fence();
  } else {
    group_after_group<A, false>(args, begin, end, grad_weight);
  }
}

}  // namespace

void gate_bwd_chunk(const GateBackwardArgs& args, int64_t begin, int64_t end,
                    const GradWeightRows& grad_weight) {
  simd::with_activation(args.gate.activation, [&](auto a) {
    chunk_gradients<decltype(a)>(args, begin, end, grad_weight);
  });
}

}  // namespace ehc::engram::EHC_ISA
