// engram.kv_projection_bwd on CUDA (sm_80+), on tensor cores.
//
//   grad_embedding[t,e] = round(sum_(j,i) grad_kv[t,j,i] * weight[j,i,e])
//   grad_weight[j,i,e] (+)= sum_t grad_kv[t,j,i] * embedding[t,e]
//   grad_bias[j,i]     (+)= sum_t grad_kv[t,j,i]
//   grad_kv A[T,n+1,d]; embedding A[T,E]; weight A[n+1,d,E]
//
// Cost: 4*T*E*(n+1)*d FLOP.
// Algorithm: two products of backends/cuda/product.cuh. grad_bias: a warp sums chains of 128 tokens
// of 32 columns; those of a block's warps are added in order.
// Class R: sums over tokens are cut by T alone. grad_embedding of a token depends on it alone.
#include "backends/cuda/product.cuh"
#include "core/float_formats.h"
#include "ops/engram/kv_projection_bwd/kv_projection_bwd_args.h"

namespace ehc::engram {

namespace {

struct StoreEmbedding {
  ProjectionBackwardArgs a;

  __device__ __forceinline__ void operator()(int64_t t, int64_t e, float first,
                                             float second) const {
    const int64_t at = t * a.grad_embedding_stride + e;
    if (e + 1 < a.depth) return cuda::store_two(a.grad_embedding, a.type, at, first, second);
    store_float(a.grad_embedding, a.type, at, first);
  }
};

struct StoreWeight {
  ProjectionBackwardArgs a;

  __device__ __forceinline__ void operator()(int64_t row, int64_t e, float first,
                                             float second) const {
    const int64_t j = static_cast<uint32_t>(row) / static_cast<uint32_t>(a.width);
    const int64_t i = row - j * a.width;
    float* to = a.grad_weight + j * a.grad_weight_stride + i * a.grad_weight_row_stride + e;
    const float* target = a.grad_weight_acc == nullptr
                              ? nullptr
                              : a.grad_weight_acc + j * a.grad_weight_acc_stride +
                                    i * a.grad_weight_acc_row_stride + e;
    to[0] = target == nullptr ? first : target[0] + first;
    if (e + 1 < a.depth) to[1] = target == nullptr ? second : target[1] + second;
  }
};

constexpr int kWarps = 8;

__global__ void __launch_bounds__(kWarps * 32)
    grad_bias(const __grid_constant__ ProjectionBackwardArgs a) {
  __shared__ float chain[kWarps][32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t columns = a.branches * a.width;
  const int64_t column = min(static_cast<int64_t>(blockIdx.x) * 32 + lane, columns - 1);
  const int64_t j = column / a.width;
  const int64_t i = column % a.width;
  const int64_t first = j * a.grad_kv_stride + i;
  float total = 0;
  for (int64_t round = 0; round < a.tokens; round += kWarps * kProjectionChain) {
    const int64_t begin = round + warp * kProjectionChain;
    const int64_t end = min(a.tokens, begin + kProjectionChain);
    float sum = 0;
#pragma unroll 8
    for (int64_t t = begin; t < end; ++t) {
      sum += load_float(a.grad_kv, a.type, t * a.grad_kv_token_stride + first);
    }
    chain[warp][lane] = sum;
    __syncthreads();
    for (int w = 0; warp == 0 && w < kWarps; ++w) {
      if (round + w * kProjectionChain < a.tokens) total += chain[w][lane];
    }
    __syncthreads();
  }
  if (warp != 0 || static_cast<int64_t>(blockIdx.x) * 32 + lane >= columns) return;
  const float* target = a.grad_bias_acc;
  a.grad_bias[j * a.grad_bias_stride + i] =
      (target == nullptr ? 0.0f : target[j * a.grad_bias_acc_stride + i]) + total;
}

}  // namespace

void kv_projection_bwd_cuda(const ProjectionBackwardArgs& a, int device, void* stream) {
  constexpr const char* kName = "engram.kv_projection_bwd";
  const int64_t columns = a.branches * a.width;
  const cuda::Operand grad_kv = {.data = a.grad_kv,
                                 .outer = a.tokens,
                                 .inner = columns,
                                 .outer_count = a.tokens,
                                 .outer_stride = a.grad_kv_token_stride,
                                 .inner_count = a.width,
                                 .inner_block = a.grad_kv_stride};
  const cuda::Operand embedding = {.data = a.embedding,
                                   .outer = a.tokens,
                                   .inner = a.depth,
                                   .outer_count = a.tokens,
                                   .outer_stride = a.embedding_stride,
                                   .inner_count = a.depth};
  const cuda::Operand weight = {.data = a.weight,
                                .outer = columns,
                                .inner = a.depth,
                                .outer_count = a.width,
                                .outer_stride = a.weight_row_stride,
                                .outer_block = a.weight_stride,
                                .inner_count = a.depth};
  cuda::with_activation(a.type, [&](auto type) {
    using A = decltype(type);
    cuda::launch_product<A, false, true>(kName, device, stream, grad_kv, weight, StoreEmbedding{a});
    cuda::launch_product<A, true, true>(kName, device, stream, grad_kv, embedding, StoreWeight{a});
  });
  cuda::launch(kName, device, stream, &grad_bias, dim3(cuda::blocks((columns + 31) / 32)),
               dim3(kWarps * 32), 0, a);
}

}  // namespace ehc::engram
