// engram.kv_projection_fwd on CUDA (sm_80+), on tensor cores.
//
//   kv[t,j,i] = round(sum_e embedding[t,e] * weight[j,i,e] + bias[j,i])
//   embedding A[T,E]; weight A[n+1,d,E]; bias A[n+1,d]; kv A[T,n+1,d]
//
// Cost: 2*T*E*(n+1)*d FLOP. Bytes: embedding and weight once per tile of 128 sums of the other.
// Algorithm: the product of backends/cuda/product.cuh; a tile adds the bias and rounds.
// Class B here: a sum depends on its token, E and the type alone.
#include "backends/cuda/product.cuh"
#include "core/float_formats.h"
#include "ops/engram/kv_projection/kv_projection_args.h"

namespace ehc::engram {

namespace {

struct Store {
  ProjectionArgs a;

  __device__ __forceinline__ void operator()(int64_t t, int64_t column, float first,
                                             float second) const {
    const int64_t j = static_cast<uint32_t>(column) / static_cast<uint32_t>(a.width);
    const int64_t i = column - j * a.width;
    const int64_t at = t * a.kv_token_stride + j * a.kv_stride + i;
    if (i + 1 == a.width) {  // the next one, if there is one, is in another branch
      store_float(a.kv, a.type, at, with_bias(j, i, first));
      if (j + 1 == a.branches) return;
      store_float(a.kv, a.type, t * a.kv_token_stride + (j + 1) * a.kv_stride,
                  with_bias(j + 1, 0, second));
      return;
    }
    cuda::store_two(a.kv, a.type, at, with_bias(j, i, first), with_bias(j, i + 1, second));
  }
  __device__ __forceinline__ float with_bias(int64_t j, int64_t i, float sum) const {
    return a.bias == nullptr ? sum : sum + load_float(a.bias, a.type, j * a.bias_stride + i);
  }
};

}  // namespace

void kv_projection_cuda(const ProjectionArgs& a, int device, void* stream) {
  const cuda::Operand embedding = {.data = a.embedding,
                                   .outer = a.tokens,
                                   .inner = a.depth,
                                   .outer_count = a.tokens,
                                   .outer_stride = a.embedding_stride,
                                   .inner_count = a.depth};
  const cuda::Operand weight = {.data = a.weight,
                                .outer = a.branches * a.width,
                                .inner = a.depth,
                                .outer_count = a.width,
                                .outer_stride = a.weight_row_stride,
                                .outer_block = a.weight_stride,
                                .inner_count = a.depth};
  cuda::with_activation(a.type, [&](auto type) {
    cuda::launch_product<decltype(type), false, false>("engram.kv_projection_fwd", device, stream,
                                                       embedding, weight, Store{a});
  });
}

}  // namespace ehc::engram
