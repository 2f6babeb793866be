// mhc.merge_fwd and mhc.merge_bwd on SIMD lanes.
//
//   merged[j,k] = fn[j,k] w[k]
//   grad_fn[j,k] = grad[j,k] w[k] + target    grad_w[k] = target + sum_j grad[j,k] fn[j,k]
//   fn, merged and their gradients F32[M,K], w F32[K]
//
// Bytes: forward 8*M*K + 4*K; backward 12*M*K + 8*K, with targets 16*M*K + 12*K.
// Algorithm: blocks of columns whose sums stay in the first-level cache while the rows go by.
// Class E: each column on its own, its sum in the order of the rows.
#include "backends/cpu/simd.h"
#include "ops/mhc/merge/merge_args.h"

namespace ehc::mhc::EHC_ISA {
namespace {

namespace simd = ehc::simd::EHC_ISA;
using simd::kPair;
using simd::Pair;

inline constexpr int64_t kBlock = 1024;
static_assert(kBlock % kPair == 0);

EHC_SIMD void merge_row(const MergeBackwardArgs& a, int64_t row, int64_t begin, int64_t count,
                        float* sums) {
  const float* grad = a.grad_merged.data + row * a.grad_merged.stride + begin;
  const float* fn = a.fn.data + row * a.fn.stride + begin;
  const float* before =
      a.grad_fn_acc.data ? a.grad_fn_acc.data + row * a.grad_fn_acc.stride + begin : nullptr;
  float* grad_fn = a.grad_fn.data + row * a.grad_fn.stride + begin;
  for (int64_t i = 0; i < count; i += kPair) {
    const int64_t rest = count - i;
    const Pair g = simd::load_some(grad + i, rest);
    const Pair target = before ? simd::load_some(before + i, rest) : simd::zero_pair();
    simd::store(sums + i, fma(g, simd::load_some(fn + i, rest), simd::load(sums + i)));
    simd::store_some(grad_fn + i, fma(g, simd::load_some(a.norm_weight + begin + i, rest), target),
                     rest, false);
  }
}

}  // namespace

void merge_fwd_columns(const MergeForwardArgs& a, int64_t begin, int64_t end) {
  for (int64_t j = 0; j < a.mixes; ++j) {
    const float* fn = a.fn.data + j * a.fn.stride;
    float* merged = a.merged.data + j * a.merged.stride;
    for (int64_t k = begin; k < end; k += kPair) {
      const int64_t rest = end - k;
      const Pair weight = simd::load_some(a.norm_weight + k, rest);
      simd::store_some(merged + k, mul(simd::load_some(fn + k, rest), weight), rest, false);
    }
  }
}

void merge_bwd_columns(const MergeBackwardArgs& a, int64_t begin, int64_t end) {
  alignas(64) float sums[kBlock];
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = end - at < kBlock ? end - at : kBlock;
    for (int64_t i = 0; i < count; i += kPair) simd::store(sums + i, simd::zero_pair());
    for (int64_t j = 0; j < a.mixes; ++j) merge_row(a, j, at, count, sums);
    for (int64_t i = 0; i < count; i += kPair) {
      const int64_t rest = count - i;
      const Pair before =
          a.grad_weight_acc ? simd::load_some(a.grad_weight_acc + at + i, rest) : simd::zero_pair();
      simd::store_some(a.grad_weight + at + i, add(before, simd::load(sums + i)), rest, false);
    }
  }
}

}  // namespace ehc::mhc::EHC_ISA
