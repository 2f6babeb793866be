// The momentum of one row on SIMD lanes, for momentum_update and the whole optimizer step.
#pragma once

#include "backends/cpu/simd.h"
#include "ops/engram/momentum_update/momentum_update_args.h"

namespace ehc::engram::EHC_ISA {
namespace {

namespace simd = ehc::simd::EHC_ISA;
using simd::Bf16;
using simd::kPair;
using simd::Pair;
using simd::Vec;

// Calls body with a value of the storage type of a weight or state, bf16 or f32.
template <class Body>
inline void with_weight(DType type, const Body& body) {
  if (type == DType::bf16) {
    body(Bf16{});
  } else {
    body(float{});
  }
}

// Elements in natural order, whatever the type: then sums of squares have the lanes that the
// sinkhorn operators give them.
template <class W>
EHC_SIMD Pair load_natural(const W* p, int64_t count) {
  return simd::natural_order<W>(simd::load_some(p, count));
}
template <class W>
EHC_SIMD void store_natural(W* p, Pair x, int64_t count, bool streaming) {
  simd::store_some(p, simd::lane_order<W>(x), count, streaming);
}

template <class Grad, class Momentum>
struct MomentumRow {
  const Grad* grad;
  const Momentum* momentum;
  Momentum* new_momentum;
  float* update;
};

// Calls use(column, update, count) for each pair of columns of the row.
template <bool kNesterov, class Grad, class Momentum, class Use>
EHC_SIMD void move_row(const MomentumFactors& factors, const MomentumRow<Grad, Momentum>& row,
                       int64_t width, bool streaming, const Use& use) {
  const Vec beta = simd::splat(factors.beta), fresh = simd::splat(factors.fresh);
  const bool stream_update = streaming && simd::can_stream(row.update);
  // In place the line is in the cache anyway.
  const bool stream_momentum =
      streaming && row.momentum != row.new_momentum && simd::can_stream(row.new_momentum);
  const auto move_pair = [&](int64_t i, int64_t count) EHC_SIMD_LAMBDA {
    const Pair grad = load_natural(row.grad + i, count);
    const Pair moved = fma(beta, load_natural(row.momentum + i, count), mul(grad, fresh));
    const Pair update = kNesterov ? fma(fresh, grad, mul(moved, beta)) : moved;
    store_natural(row.new_momentum + i, moved, count, stream_momentum);
    simd::store_some(row.update + i, update, count, stream_update);
    use(i, update, count);
  };
  int64_t i = 0;
  for (; i + kPair <= width; i += kPair) move_pair(i, kPair);  // whole pairs: no test inside
  if (i < width) move_pair(i, width - i);
}

}  // namespace
}  // namespace ehc::engram::EHC_ISA
