// mhc.head_mix_fwd and mhc.head_mix_bwd on CUDA (sm_80+).
//
//   u = mixes * scale + base; pre = sigmoid(u) + eps
//   delta = grad_pre sigmoid'(u); grad_mixes = delta scale
//   grad_base = sum_t delta, grad_scale = sum_t,j delta mixes
//   mixes, pre and their gradients F32[T,n], scale F32[1], base F32[n]
//
// Bytes a token: forward 8*n, backward 12*n.
// Algorithm: a thread per mix of a token; backward a block per chunk of tokens with a column of
// threads per mix, then a thread per sum, which adds the chunks in order.
// A token's outputs depend on it alone; the sums are class R, their order depends on T and n.
#include "ops/mhc/head_mix/head_mix_args.h"
#include "ops/mhc/shared/chunk_sums.cuh"
#include "ops/mhc/split/split_math.h"

namespace ehc::mhc {

namespace {

struct Forward {
  HeadMixForwardArgs a;

  __device__ void operator()(int64_t i) const {
    const int64_t t = i / a.streams;
    const int64_t j = i % a.streams;
    const float mix = a.mixes.data[t * a.mixes.token_stride + j];
    a.pre.data[t * a.pre.token_stride + j] =
        mix_gate(mix_logit(mix, *a.scale, a.base[j]), 1.0f, a.pre_eps);
  }
};

struct Backward {
  HeadMixBackwardArgs a;
  float* scale;  // F32[P]
  float* base;   // F32[P,n]

  static constexpr int kSegments = 1;
  __device__ int begin_of(int segment) const { return segment * static_cast<int>(a.streams); }
  __device__ MixGradient at(int64_t t, int64_t j) const {
    const float mix = __ldg(a.mixes.data + t * a.mixes.token_stride + j);
    const float grad = mix_gate_gradient(mix_logit(mix, *a.scale, a.base[j]), 1.0f,
                                         __ldg(a.grad_pre.data + t * a.grad_pre.token_stride + j));
    a.grad_mixes.data[t * a.grad_mixes.token_stride + j] = grad * *a.scale;
    return {grad, mix};
  }
  __device__ void put_base(int64_t chunk, int64_t j, float sum) const {
    base[chunk * a.streams + j] = sum;
  }
  __device__ void put_scale(int64_t chunk, int64_t, float sum) const { scale[chunk] = sum; }
};

}  // namespace

void head_mix_fwd_cuda(const HeadMixForwardArgs& a, int64_t tokens, int device, void* stream) {
  cuda::launch_each("mhc.head_mix_fwd", device, stream, tokens * a.streams, Forward{a});
}

void head_mix_bwd_cuda(const HeadMixBackwardArgs& a, float* scale, float* base, int64_t tokens,
                       int device, void* stream) {
  launch_chunks("mhc.head_mix_bwd", device, stream, tokens, a.streams, Backward{a, scale, base});
}

}  // namespace ehc::mhc
