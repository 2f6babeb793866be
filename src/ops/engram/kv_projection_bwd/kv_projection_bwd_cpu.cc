// Steps of engram.kv_projection_bwd on SIMD lanes: packing, rounding, and the sum of the bias.
//
//   grad_embedding[t,e] = round(sum_(j,i) grad_kv[t,j,i] * weight[j,i,e])
//   grad_weight[j,i,e] (+)= sum_t grad_kv[t,j,i] * embedding[t,e]
//   grad_bias[j,i]     (+)= sum_t grad_kv[t,j,i]
//   grad_kv A[T,n+1,d]; embedding A[T,E]; weight A[n+1,d,E]
//
// Cost: 4*T*E*(n+1)*d FLOP. kv_projection_bwd.cc cuts the blocks; the product of packed panels is
// that of the forward (kv_projection_cpu.cc). Sums over t are chains of 128 tokens from +0, added
// in ascending order: fixed by T alone. Class R per implementation.
#include "backends/cpu/simd.h"
#include "ops/engram/kv_projection_bwd/kv_projection_bwd_args.h"

namespace ehc::engram::EHC_ISA {

namespace {

namespace simd = ehc::simd::EHC_ISA;
using simd::Bf16;
using simd::F16;
using simd::kPair;
using simd::Pair;

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <class A>
void pack_by_depth(const ProjectionRows& rows, int64_t first, int64_t count, int64_t column,
                   int64_t columns, int64_t panel, float* out) {
  for (int64_t k = 0; k < count; ++k) {
    const int64_t r = first + k;
    const A* from = static_cast<const A*>(rows.data) + r / rows.inner_count * rows.outer_stride +
                    r % rows.inner_count * rows.inner_stride + column;
    float* to = out + k * panel;
    for (int64_t c = 0; c < columns; c += panel, to += count * panel) {
      const int64_t end = smaller(c + panel, columns);
      for (int64_t i = 0; i < panel && c + i < end; i += kPair) {
        const Pair x = simd::natural_order<A>(simd::load_some(from + c + i, end - c - i));
        simd::store_some(to + i, x, panel - i, false);
      }
    }
  }
}

template <class A>
void finish_embedding(const ProjectionBackwardArgs& a, const ProjectionBlock& block,
                      const float* sums, int64_t stride) {
  for (int64_t r = 0; r < block.rows; ++r) {
    A* to = static_cast<A*>(a.grad_embedding) + (block.row + r) * a.grad_embedding_stride +
            block.column;
    for (int64_t i = 0; i < block.columns; i += kPair) {
      const int64_t rest = block.columns - i;
      simd::store_some(to + i, simd::load_f32_some<A>(sums + r * stride + i, rest), rest, false);
    }
  }
}

void finish_weight(const ProjectionBackwardArgs& a, int64_t branch, const ProjectionBlock& block,
                   const float* sums, int64_t stride) {
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t row = block.row + r;
    float* to = a.grad_weight + branch * a.grad_weight_stride + row * a.grad_weight_row_stride +
                block.column;
    const float* target = nullptr;
    if (a.grad_weight_acc != nullptr) {
      target = a.grad_weight_acc + branch * a.grad_weight_acc_stride +
               row * a.grad_weight_acc_row_stride + block.column;
    }
    for (int64_t i = 0; i < block.columns; i += kPair) {
      const int64_t rest = block.columns - i;
      Pair sum = simd::load_some(sums + r * stride + i, rest);
      if (target != nullptr) sum = add(simd::load_some(target + i, rest), sum);
      simd::store_some(to + i, sum, rest, false);
    }
  }
}

template <class A>
void sum_bias(const ProjectionBackwardArgs& a, int64_t branch, int64_t begin, int64_t end) {
  constexpr int64_t kPairs = 4;
  for (int64_t i = begin; i < end; i += kPairs * kPair) {
    const A* from = static_cast<const A*>(a.grad_kv) + branch * a.grad_kv_stride + i;
    Pair total[kPairs];
    for (Pair& pair : total) pair = simd::zero_pair();
    for (int64_t t = 0; t < a.tokens; t += kProjectionChain) {
      Pair chain[kPairs];
      for (Pair& pair : chain) pair = simd::zero_pair();
      for (int64_t k = t; k < smaller(t + kProjectionChain, a.tokens); ++k) {
        const A* row = from + k * a.grad_kv_token_stride;
        for (int64_t p = 0; p < kPairs && i + p * kPair < end; ++p) {
          chain[p] = add(chain[p], simd::load_some(row + p * kPair, end - i - p * kPair));
        }
      }
      for (int64_t p = 0; p < kPairs; ++p) total[p] = add(total[p], chain[p]);
    }
    for (int64_t p = 0; p < kPairs && i + p * kPair < end; ++p) {
      const int64_t at = i + p * kPair;
      Pair sum = simd::natural_order<A>(total[p]);
      if (a.grad_bias_acc != nullptr) {
        const float* target = a.grad_bias_acc + branch * a.grad_bias_acc_stride + at;
        sum = add(simd::load_some(target, end - at), sum);
      }
      simd::store_some(a.grad_bias + branch * a.grad_bias_stride + at, sum, end - at, false);
    }
  }
}

template <class A>
ProjectionBackwardSteps steps_of() {
  return {&pack_by_depth<A>, &finish_embedding<A>, &finish_weight, &sum_bias<A>};
}

}  // namespace

ProjectionBackwardSteps projection_backward_steps(DType type) {
  if (type == DType::f32) return steps_of<float>();
  if (type == DType::bf16) return steps_of<Bf16>();
  return steps_of<F16>();
}

}  // namespace ehc::engram::EHC_ISA
