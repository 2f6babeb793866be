// What the broadcast seam has of its own on CUDA (sm_80+): a projection whose streams are one row.
//
//   sum[j,c] = fn[j,0,c] + fn[j,1,c] + ... + fn[j,n-1,c]; backwards every part gets the gradient
//   fn F32[N,n*d], sum F32[N,d]
//
// Bytes: 4*N*(n+1)*d; backwards 8*N*n*d, with targets 12*N*n*d.
// Algorithm: a thread per element. Class E: each element on its own, streams ascending.
#include "backends/cuda/launch.cuh"
#include "ops/mhc/seam/seam_args.h"

namespace ehc::mhc {

namespace {

struct FnSum {
  FnSumArgs a;

  __device__ void operator()(int64_t i) const {
    const int64_t j = i / a.hidden;
    const int64_t c = i % a.hidden;
    const float* fn = a.fn.data + j * a.fn.stride + c;
    float sum = __ldg(fn);
    for (int64_t s = 1; s < a.streams; ++s) sum += __ldg(fn + s * a.hidden);
    a.sum.data[j * a.sum.stride + c] = sum;
  }
};

struct SumCoefficients {
  Coefficients pre, sum;
  int64_t streams;

  __device__ void operator()(int64_t t) const {
    float total = pre.data == nullptr ? 1.0f : 0.0f;
    if (pre.data != nullptr) {
      for (int64_t i = 0; i < streams; ++i) total += pre.data[t * pre.token_stride + i];
    }
    sum.data[t * sum.token_stride] = total;
  }
};

struct CopyRows {
  MixRows from, target, to;
  int64_t columns;

  __device__ void operator()(int64_t i) const {
    const int64_t j = i / columns;
    const int64_t c = i % columns;
    const float value = from.data[j * from.stride + c];
    to.data[j * to.stride + c] =
        target.data == nullptr ? value : target.data[j * target.stride + c] + value;
  }
};

}  // namespace

void fn_sum_cuda(const FnSumArgs& a, int64_t mixes, int device, void* stream) {
  cuda::launch_each("mhc.fn_sum", device, stream, mixes * a.hidden, FnSum{a});
}

void sum_coefficients_cuda(const Coefficients& pre, const Coefficients& sum, int64_t tokens,
                           int64_t streams, int device, void* stream) {
  cuda::launch_each("mhc.sum_coefficients", device, stream, tokens,
                    SumCoefficients{pre, sum, streams});
}

void copy_rows_cuda(const MixRows& from, const MixRows& target, const MixRows& to, int64_t rows,
                    int64_t columns, int device, void* stream) {
  cuda::launch_each("mhc.copy_rows", device, stream, rows * columns,
                    CopyRows{from, target, to, columns});
}

}  // namespace ehc::mhc
