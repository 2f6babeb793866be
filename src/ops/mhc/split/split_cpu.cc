// mhc.split_fwd, mhc.split_bwd and mhc.split_bwd_reduce on SIMD lanes.
//
//   u = mixes * scale + base; pre = sigmoid(u) + eps, post = mult sigmoid(u), comb_logits = u
//   of u: grad_pre s', grad_post mult s', grad_comb_logits; grad_mixes = (of u) scale
//   grad_base = sum_t (of u), grad_scale = sum_t sum over the segment of (of u) mixes
//   mixes F32[T,N], pre and post F32[T,n], comb F32[T,n,n]; scale F32[3], base F32[N]
//
// Bytes a token: forward 8*N, backward 12*N; a reduction 4*P*width.
// Algorithm: lanes are mixes. The first 2n, those with a sigmoid, are a vector or two of their own,
// the n*n of comb the others. Sums over tokens stay in vectors for a chunk and are added over the
// lanes of a segment at its end, in ascending order.
// A token's outputs depend on it alone; the sums are class R.
#include "ops/mhc/shared/matrix_rows_simd.h"
#include "ops/mhc/split/split_args.h"

namespace ehc::mhc::EHC_ISA {
namespace {

using simd::kLanes;
using simd::kPair;
using simd::Pair;

inline constexpr int64_t kCombPairs = kMatrixRoom / kPair;
static_assert(2 * kMaxStreams <= kPair);

// What a call needs for the mixes with a sigmoid, lane by lane.
struct GateLanes {
  Pair scale, base, factor, shift;
  int64_t count;  // 2n

  GateLanes(int64_t streams, const float* scales, const float* bases, float post_mult,
            float pre_eps)
      : base(simd::load_some(bases, 2 * streams)), count(2 * streams) {
    float of_scale[kPair] = {}, of_factor[kPair] = {}, of_shift[kPair] = {};
    for (int64_t j = 0; j < count; ++j) {
      const bool is_pre = j < streams;
      of_scale[j] = scales[is_pre ? 0 : 1];
      of_factor[j] = is_pre ? 1.0f : post_mult;
      of_shift[j] = is_pre ? pre_eps : 0.0f;
    }
    scale = simd::load(of_scale);
    factor = simd::load(of_factor);
    shift = simd::load(of_shift);
  }
};

EHC_SIMD Pair sigmoid(Pair x, int64_t count) {
  return {simd::sigmoid(x.a), count > kLanes ? simd::sigmoid(x.b) : simd::zero()};
}
EHC_SIMD Pair sigmoid_slope(Pair x, int64_t count) {
  return {simd::sigmoid_slope(x.a), count > kLanes ? simd::sigmoid_slope(x.b) : simd::zero()};
}

}  // namespace

void split_fwd_tokens(const SplitForwardArgs& a, int64_t begin, int64_t end) {
  const int64_t n = a.streams, matrix = n * n;
  const GateLanes gate(n, a.scale, a.base, a.post_mult, a.pre_eps);
  const Pair comb_scale = {simd::splat(a.scale[2]), simd::splat(a.scale[2])};
  Pair comb_base[kCombPairs];
  for (int64_t i = 0; i < matrix; i += kPair) {
    comb_base[i / kPair] = simd::load_some(a.base + 2 * n + i, matrix - i);
  }
  const bool packed = is_packed(a.comb_logits, n);
  for (int64_t t = begin; t < end; ++t) {
    const float* mixes = token_values(a.mixes, t);
    float gates[kPair];
    const Pair logit = fma(simd::load_some(mixes, gate.count), gate.scale, gate.base);
    simd::store(gates, fma(sigmoid(logit, gate.count), gate.factor, gate.shift));
    float* pre = token_values(a.pre, t);
    float* post = token_values(a.post, t);
    for (int64_t j = 0; j < n; ++j) pre[j] = gates[j], post[j] = gates[n + j];

    float room[kMatrixRoom];
    float* logits = packed ? token_values(a.comb_logits, t) : room;
    for (int64_t i = 0; i < matrix; i += kPair) {
      const int64_t count = matrix - i;
      const Pair mix = simd::load_some(mixes + 2 * n + i, count);
      simd::store_some(logits + i, fma(mix, comb_scale, comb_base[i / kPair]), count, false);
    }
    if (!packed) unpack_matrix(a.comb_logits, t, n, room);
  }
}

void split_bwd_chunk(const SplitBackwardArgs& a, const SplitPartial& partial, int64_t begin,
                     int64_t end) {
  const int64_t n = a.streams, matrix = n * n;
  const GateLanes gate(n, a.scale, a.base, a.post_mult, 0);
  const simd::Vec comb_scale = simd::splat(a.scale[2]);
  Pair of_base[1 + kCombPairs], of_scale[1 + kCombPairs];
  for (Pair& x : of_base) x = simd::zero_pair();
  for (Pair& x : of_scale) x = simd::zero_pair();

  for (int64_t t = begin; t < end; ++t) {
    const float* mixes = token_values(a.mixes, t);
    float* grad_mixes = token_values(a.grad_mixes, t);
    float grads[kPair] = {};
    const float* grad_pre = token_values(a.grad_pre, t);
    const float* grad_post = token_values(a.grad_post, t);
    for (int64_t j = 0; j < n; ++j) grads[j] = grad_pre[j], grads[n + j] = grad_post[j];
    const Pair mix = simd::load_some(mixes, gate.count);
    const Pair slope = sigmoid_slope(fma(mix, gate.scale, gate.base), gate.count);
    const Pair grad = mul(mul(simd::load(grads), gate.factor), slope);
    of_base[0] = add(of_base[0], grad);
    of_scale[0] = fma(grad, mix, of_scale[0]);
    simd::store_some(grad_mixes, mul(grad, gate.scale), gate.count, false);

    float room[kMatrixRoom];
    const float* grad_logits = packed_matrix(a.grad_comb_logits, t, n, room);
    for (int64_t i = 0; i < matrix; i += kPair) {
      const int64_t count = matrix - i, at = 1 + i / kPair;
      const Pair of_logit = simd::load_some(grad_logits + i, count);
      of_base[at] = add(of_base[at], of_logit);
      of_scale[at] = fma(of_logit, simd::load_some(mixes + 2 * n + i, count), of_scale[at]);
      simd::store_some(grad_mixes + 2 * n + i, mul(of_logit, comb_scale), count, false);
    }
  }

  float products[(1 + kCombPairs) * kPair];
  for (int64_t i = 0; i <= kCombPairs; ++i) simd::store(products + i * kPair, of_scale[i]);
  const auto sum = [&](const float* first, int64_t count) {
    float total = 0;
    for (int64_t j = 0; j < count; ++j) total += first[j];
    return total;
  };
  partial.scale[0] = sum(products, n);
  partial.scale[1] = sum(products + n, n);
  partial.scale[2] = sum(products + kPair, matrix);
  simd::store_some(partial.base, of_base[0], gate.count, false);
  for (int64_t i = 0; i < matrix; i += kPair) {
    simd::store_some(partial.base + 2 * n + i, of_base[1 + i / kPair], matrix - i, false);
  }
}

void add_partials(const PartialSum& s) {
  for (int64_t j = 0; j < s.width; j += kPair) {
    const int64_t count = s.width - j;
    Pair sum = simd::zero_pair();
    for (int64_t p = 0; p < s.partials; ++p) {
      sum = add(sum, simd::load_some(s.partial + p * s.partial_stride + j, count));
    }
    const Pair before =
        s.accumulated ? simd::load_some(s.accumulated + j, count) : simd::zero_pair();
    simd::store_some(s.sum + j, add(before, sum), count, false);
  }
}

}  // namespace ehc::mhc::EHC_ISA
