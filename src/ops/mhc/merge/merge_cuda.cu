// mhc.merge_fwd and mhc.merge_bwd on CUDA (sm_80+).
//
//   fn'[j,k] = fn[j,k] w[k]
//   grad_fn[j,k] = target + grad_fn'[j,k] w[k], grad_w[k] = target + sum_j grad_fn'[j,k] fn[j,k]
//   fn, fn' and gradients F32[M,K], w and grad_w F32[K]
//
// Bytes: forward 8*M*K + 4*K, backward 12*M*K + 8*K, with targets 16*M*K + 12*K.
// Algorithm: a thread per column, its rows one after the other.
// Class E; the sum of grad_w runs over ascending j.
#include "backends/cuda/launch.cuh"
#include "ops/mhc/merge/merge_args.h"

namespace ehc::mhc {

namespace {

struct Forward {
  MergeForwardArgs a;

  __device__ void operator()(int64_t k) const {
    const float weight = a.norm_weight[k];
#pragma unroll 8
    for (int64_t j = 0; j < a.mixes; ++j) {
      a.merged.data[j * a.merged.stride + k] = a.fn.data[j * a.fn.stride + k] * weight;
    }
  }
};

struct Backward {
  MergeBackwardArgs a;

  __device__ void operator()(int64_t k) const {
    const float weight = a.norm_weight[k];
    float sum = 0;
#pragma unroll 4
    for (int64_t j = 0; j < a.mixes; ++j) {
      const float grad = a.grad_merged.data[j * a.grad_merged.stride + k];
      const float* target = a.grad_fn_acc.data;
      const float before = target != nullptr ? target[j * a.grad_fn_acc.stride + k] : 0.0f;
      sum = fmaf(grad, a.fn.data[j * a.fn.stride + k], sum);
      a.grad_fn.data[j * a.grad_fn.stride + k] = fmaf(grad, weight, before);
    }
    a.grad_weight[k] = (a.grad_weight_acc != nullptr ? a.grad_weight_acc[k] : 0.0f) + sum;
  }
};

}  // namespace

void merge_fwd_cuda(const MergeForwardArgs& a, int64_t columns, int device, void* stream) {
  cuda::launch_each("mhc.merge_fwd", device, stream, columns, Forward{a});
}

void merge_bwd_cuda(const MergeBackwardArgs& a, int64_t columns, int device, void* stream) {
  cuda::launch_each("mhc.merge_bwd", device, stream, columns, Backward{a});
}

}  // namespace ehc::mhc
