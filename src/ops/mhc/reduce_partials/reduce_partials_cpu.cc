// mhc.reduce_partials_fwd and mhc.reduce_partials_bwd on SIMD lanes.
//
//   m[g,j] = sum_s mul_partial[s,g,j]   q[g] = sum_s sqr_partial[s,g]   mixes[j] = sum_g m[g,j]
//   r(q[g]) grad_m[g,j] = grad[j] r(q[g])       grad_q[g] = rms_gradient of sum_j grad[j] m[g,j]
//   partials F32[S,T,G,M] and F32[S,T,G]; m F32[T,G,M], q F32[T,G], mixes and grad F32[T,M]
//
// Bytes a token: forward 4*S*G*(M+1) + 4*G*(M+1) + 4*M, backward 8*G*(M+1) + 4*M.
// Algorithm: lanes are mixes, splits are added in the fixed tree of pairwise_sum.
// Class E but for grad_q, whose sum is a tree over lanes that depends on M alone. Tokens are
// independent.
#include "backends/cpu/simd.h"
#include "ops/mhc/reduce_partials/reduce_partials_args.h"
#include "ops/mhc/shared/pairwise_sum.h"

namespace ehc::mhc::EHC_ISA {
namespace {

namespace simd = ehc::simd::EHC_ISA;
using simd::kPair;
using simd::Pair;

inline constexpr int64_t kMaxMixes = 80;
inline constexpr int64_t kPairs = (kMaxMixes + kPair - 1) / kPair;

EHC_SIMD float* row(const GroupRows& rows, int64_t token, int64_t group) {
  return rows.data + token * rows.token_stride + group * rows.group_stride;
}

EHC_SIMD Pair sum_of_splits(const float* first, int64_t stride, int64_t splits, int64_t count) {
  return pairwise_sum(splits, simd::zero_pair(), [&](int64_t s) EHC_SIMD_LAMBDA {
    return simd::load_some(first + s * stride, count);
  });
}

}  // namespace

void reduce_partials_fwd_tokens(const ReducePartialsForwardArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    Pair mixed[kPairs];
    for (Pair& x : mixed) x = simd::zero_pair();
    for (int64_t g = 0; g < a.groups; ++g) {
      const float* squares = row(a.sqr_partial, t, g);
      const float sqr = pairwise_sum(a.splits, 0.0f, [&](int64_t s) EHC_SIMD_LAMBDA {
        return squares[s * a.sqr_partial.split_stride];
      });
      if (a.sqr.data) *row(a.sqr, t, g) = sqr;
      const simd::Vec factor = simd::splat(rms_factor(a.rms, sqr));
      const float* partial = row(a.mul_partial, t, g);
      for (int64_t j = 0; j < a.mixes; j += kPair) {
        const int64_t count = a.mixes - j;
        const Pair mul = sum_of_splits(partial + j, a.mul_partial.split_stride, a.splits, count);
        if (a.mul.data) simd::store_some(row(a.mul, t, g) + j, mul, count, false);
        mixed[j / kPair] = fma(factor, mul, mixed[j / kPair]);
      }
    }
    float* out = row(a.mixed, t, 0);
    for (int64_t j = 0; j < a.mixes; j += kPair) {
      simd::store_some(out + j, mixed[j / kPair], a.mixes - j, false);
    }
  }
}

void reduce_partials_bwd_tokens(const ReducePartialsBackwardArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const float* grad_mixed = row(a.grad_mixed, t, 0);
    for (int64_t g = 0; g < a.groups; ++g) {
      const float sqr = *row(a.sqr, t, g);
      const float factor = rms_factor(a.rms, sqr);
      Pair products = simd::zero_pair();
      for (int64_t j = 0; j < a.mixes; j += kPair) {
        const int64_t count = a.mixes - j;
        const Pair grad = simd::load_some(grad_mixed + j, count);
        products = fma(grad, simd::load_some(row(a.mul, t, g) + j, count), products);
        simd::store_some(row(a.grad_mul, t, g) + j, mul(grad, simd::splat(factor)), count, false);
      }
      *row(a.grad_sqr, t, g) = rms_gradient(a.rms, sqr, factor, reduce_add(products));
    }
  }
}

}  // namespace ehc::mhc::EHC_ISA
