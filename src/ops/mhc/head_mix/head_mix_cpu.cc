// mhc.head_mix_fwd and mhc.head_mix_bwd on SIMD lanes.
//
//   u = mixes * scale + base; pre = sigmoid(u) + eps
//   delta = grad_pre sigmoid'(u); grad_mixes = delta scale
//   grad_base = sum_t delta, grad_scale = sum_t,j delta mixes
//   mixes, pre and their gradients F32[T,n], scale F32[1], base F32[n]
//
// Bytes a token: forward 8*n, backward 12*n.
// Algorithm: n is small, so kPair tokens at a time are one row of n pairs of vectors; rows that lie
// apart are copied together first. Sums over tokens stay in vectors for a chunk.
// A token's outputs depend on it alone; the sums are class R.
#include "ops/mhc/head_mix/head_mix_args.h"
#include "ops/mhc/shared/stream_rows_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

using simd::kPair;
using simd::Pair;

inline constexpr int64_t kRoom = kPair * kMaxStreams;

// The base of every lane of the n pairs of a row of tokens.
struct BaseLanes {
  Pair pair[kMaxStreams];

  BaseLanes(const float* base, int64_t streams) {
    float lane[kRoom];
    for (int64_t i = 0; i < kPair * streams; ++i) lane[i] = base[i % streams];
    for (int64_t i = 0; i < streams; ++i) pair[i] = simd::load(lane + i * kPair);
  }
};

// The n values of tokens [first, first + count) side by side, in place or copied to `room`.
EHC_SIMD const float* side_by_side(const Coefficients& rows, int64_t first, int64_t count,
                                   int64_t streams, float* room) {
  const float* from = rows.data + first * rows.token_stride;
  if (rows.token_stride == streams) return from;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < streams; ++j) room[i * streams + j] = from[i * rows.token_stride + j];
  }
  return room;
}

// An output of tokens side by side; `finish` puts it where rows lie apart.
struct OutputRow {
  const Coefficients& rows;
  int64_t first, count, streams;
  float room[kRoom];

  EHC_SIMD bool apart() const { return rows.token_stride != streams; }
  EHC_SIMD float* data() { return apart() ? room : rows.data + first * rows.token_stride; }
  EHC_SIMD void finish() const {
    if (!apart()) return;
    float* to = rows.data + first * rows.token_stride;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j < streams; ++j) to[i * rows.token_stride + j] = room[i * streams + j];
    }
  }
};

}  // namespace

void head_mix_fwd_tokens(const HeadMixForwardArgs& a, int64_t begin, int64_t end) {
  const int64_t n = a.streams;
  const BaseLanes base(a.base, n);
  const simd::Vec scale = simd::splat(*a.scale), eps = simd::splat(a.pre_eps);
  for (int64_t t = begin; t < end; t += kPair) {
    const int64_t count = end - t < kPair ? end - t : kPair;
    float room[kRoom];
    const float* mixes = side_by_side(a.mixes, t, count, n, room);
    OutputRow out{a.pre, t, count, n, {}};
    for (int64_t i = 0; i * kPair < count * n; ++i) {
      const int64_t rest = count * n - i * kPair;
      const Pair u = fma(scale, simd::load_some(mixes + i * kPair, rest), base.pair[i]);
      const Pair pre = add(Pair{simd::sigmoid(u.a), simd::sigmoid(u.b)}, Pair{eps, eps});
      simd::store_some(out.data() + i * kPair, pre, rest, false);
    }
    out.finish();
  }
}

void head_mix_bwd_chunk(const HeadMixBackwardArgs& a, int64_t begin, int64_t end, float* of_scale,
                        float* of_base) {
  const int64_t n = a.streams;
  const BaseLanes base(a.base, n);
  const simd::Vec scale = simd::splat(*a.scale);
  Pair products = simd::zero_pair(), sums[kMaxStreams];
  for (Pair& sum : sums) sum = simd::zero_pair();
  for (int64_t t = begin; t < end; t += kPair) {
    const int64_t count = end - t < kPair ? end - t : kPair;
    float mix_room[kRoom], grad_room[kRoom];
    const float* mixes = side_by_side(a.mixes, t, count, n, mix_room);
    const float* grads = side_by_side(a.grad_pre, t, count, n, grad_room);
    OutputRow out{a.grad_mixes, t, count, n, {}};
    for (int64_t i = 0; i * kPair < count * n; ++i) {
      const int64_t rest = count * n - i * kPair;
      const Pair mix = simd::load_some(mixes + i * kPair, rest);
      const Pair u = fma(scale, mix, base.pair[i]);
      const Pair delta = mul(simd::load_some(grads + i * kPair, rest),
                             Pair{simd::sigmoid_slope(u.a), simd::sigmoid_slope(u.b)});
      sums[i] = add(sums[i], delta);
      products = fma(delta, mix, products);
      simd::store_some(out.data() + i * kPair, mul(delta, scale), rest, false);
    }
    out.finish();
  }
  *of_scale = reduce_add(products);
  float lane[kRoom];
  for (int64_t i = 0; i < n; ++i) simd::store(lane + i * kPair, sums[i]);
  for (int64_t j = 0; j < n; ++j) {
    float sum = 0;
    for (int64_t i = j; i < kPair * n; i += n) sum += lane[i];
    of_base[j] = sum;
  }
}

}  // namespace ehc::mhc::EHC_ISA
