// mhc.merge_fwd and mhc.merge_bwd on CUDA (sm_80+).
//
//   fn'[j,k] = fn[j,k] w[k]
//   grad_fn[j,k] = target + grad_fn'[j,k] w[k], grad_w[k] = target + sum_j grad_fn'[j,k] fn[j,k]
//   fn, fn' and gradients F32[M,K], w and grad_w F32[K]
//
// Bytes: forward 8*M*K + 4*K, backward 12*M*K + 8*K, with targets 16*M*K + 12*K.
// Algorithm: a thread per column, which reads several of its rows before it writes them.
// Class E; the sum of grad_w runs over ascending j.
#include "backends/cuda/launch.cuh"
#include "ops/mhc/merge/merge_args.h"

namespace ehc::mhc {

namespace {

// Rows whose elements are on their way at once.
constexpr int kRows = 8;

struct Forward {
  MergeForwardArgs a;

  __device__ void operator()(int64_t k) const {
    const float weight = __ldg(a.norm_weight + k);
    for (int64_t first = 0; first < a.mixes; first += kRows) {
      float fn[kRows];
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        if (first + j < a.mixes) fn[j] = __ldg(a.fn.data + (first + j) * a.fn.stride + k);
      }
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        if (first + j < a.mixes) a.merged.data[(first + j) * a.merged.stride + k] = fn[j] * weight;
      }
    }
  }
};

struct Backward {
  MergeBackwardArgs a;

  __device__ void operator()(int64_t k) const {
    const float weight = __ldg(a.norm_weight + k);
    const float* target = a.grad_fn_acc.data;
    const float before_weight = a.grad_weight_acc != nullptr ? a.grad_weight_acc[k] : 0.0f;
    float sum = 0;
    for (int64_t first = 0; first < a.mixes; first += kRows) {
      float grad[kRows], fn[kRows], before[kRows];
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const int64_t row = first + j;
        if (row >= a.mixes) continue;
        grad[j] = __ldg(a.grad_merged.data + row * a.grad_merged.stride + k);
        fn[j] = __ldg(a.fn.data + row * a.fn.stride + k);
        before[j] = target != nullptr ? target[row * a.grad_fn_acc.stride + k] : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        if (first + j >= a.mixes) continue;
        sum = fmaf(grad[j], fn[j], sum);
        a.grad_fn.data[(first + j) * a.grad_fn.stride + k] = fmaf(grad[j], weight, before[j]);
      }
    }
    a.grad_weight[k] = before_weight + sum;
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
