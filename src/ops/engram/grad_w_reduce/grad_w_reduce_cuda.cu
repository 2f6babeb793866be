// engram.grad_w_reduce on CUDA (sm_80+).
//
//   s = sum over p, ascending, of partial[p]; grad of one weight = fma(s, the other weight, target)
//   partial F32[P,n,d], weights W[n,d], targets and gradients F32[n,d]
//
// Bytes: 4*P*n*d + 12*n*d + the weights; 8*n*d with targets.
// Algorithm: a thread per column, many partials on their way at once. Serial in p for each column,
// so the bits are those of the float reference. Class E.
#include "backends/cuda/launch.cuh"
#include "core/float_formats.h"
#include "ops/engram/grad_w_reduce/grad_w_reduce_args.h"

namespace ehc::engram {

namespace {

constexpr int kTogether = 32;

struct Column {
  GradWReduceArgs a;

  __device__ static void write(const WeightGradient& to, int64_t h, int64_t i, float sum) {
    const float other = load_float(to.other.data, to.other.type, h * to.other.stream_stride + i);
    const float before =
        to.accumulated != nullptr ? to.accumulated[h * to.accumulated_stream_stride + i] : 0.0f;
    to.grad[h * to.grad_stream_stride + i] = fmaf(sum, other, before);
  }

  __device__ void operator()(int64_t at) const {
    const int64_t h = at / a.hidden;
    const int64_t i = at % a.hidden;
    const float* partial = a.partial + h * a.partial_stream_stride + i;
    float sum = 0;
    int64_t p = 0;
    for (; p + kTogether <= a.partials; p += kTogether) {
      float loaded[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) loaded[k] = __ldg(partial + (p + k) * a.partial_stride);
#pragma unroll
      for (int k = 0; k < kTogether; ++k) sum += loaded[k];
    }
#pragma unroll 4
    for (; p < a.partials; ++p) sum += __ldg(partial + p * a.partial_stride);
    write(a.of_hidden, h, i, sum);
    write(a.of_embed, h, i, sum);
  }
};

}  // namespace

void grad_w_reduce_cuda(const GradWReduceArgs& a, int device, void* stream) {
  cuda::launch_each("engram.grad_w_reduce", device, stream, a.streams * a.hidden, Column{a});
}

}  // namespace ehc::engram
