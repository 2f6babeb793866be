// engram.conv_fwd on CUDA (sm_80+).
//
//   Y = V + silu(c), c[t] = sum_k W[k] * u[t - (w-1-k)*dilation], u = RMSNorm_h(V) * g
//   V, Y A[T,n,d]; state F32[B,(w-1)*dilation,n,d] holds u before the chunk, oldest first
//
// Bytes: 6nd a token in 16-bit types, of which the second read of V comes from the caches for small
// calls.
// Algorithm: first the norms, a block per token and stream; then a thread per 16 bytes of a stream
// and run of tokens, along which it keeps the sums of the taps to come (conv_rows.cuh). Class R:
// the order of the sum of a norm depends on d and the type alone, taps are added oldest first.
// Batch-invariant, and a chunk after a state has the bits of one pass.
#include "ops/engram/shared/conv_rows.cuh"

namespace ehc::engram {

namespace {

constexpr int kPacks = 2;  // of a thread, for the norms

template <class A, bool kVector>
__global__ void __launch_bounds__(kRowThreads)
    conv_norms(const __grid_constant__ ConvForwardArgs a, float* norms) {
  __shared__ WarpSums<1> sums;
  const auto streams = static_cast<unsigned>(a.streams);
  const int64_t t = blockIdx.x / streams;
  const int64_t h = blockIdx.x % streams;
  if (a.image_token_mask != nullptr && a.image_token_mask[t] != 0) return;
  const A* row =
      static_cast<const A*>(a.gated_value) + t * a.value_token_stride + h * a.value_stream_stride;
  float sum = 0;
#pragma unroll 2
  for (int64_t at = threadIdx.x * kWidth<A>; at < a.hidden; at += blockDim.x * kWidth<A>) {
    const Pack value = cuda::load_pack<kVector>(row + at, a.hidden - at);
#pragma unroll
    for (int k = 0; k < kWidth<A>; ++k) {
      sum = fmaf(column<A>(value, k), column<A>(value, k), sum);
    }
  }
  sums.put({sum});
  __syncthreads();
  if (threadIdx.x >= cuda::kWarp) return;
  const float norm = reciprocal_rms(sums.total(0), a.hidden, a.conv.eps);
  if (threadIdx.x == 0) norms[blockIdx.x] = norm;
}

struct GatedValues {
  static constexpr bool kOther = false;
  ConvForwardArgs args;
  const float* norms;  // [T,n]

  __device__ __forceinline__ float scale(int64_t t, int64_t h) const {
    return norms[t * args.streams + h];
  }
  template <class A, bool kVector>
  __device__ __forceinline__ void finish(int64_t t, int64_t h, int at, const Pack& value,
                                         const Pack&, const float (&c)[kWidth<A>],
                                         int64_t count) const {
    const Pack y = cuda::make_pack<A>([&](int k) { return column<A>(value, k) + fast_silu(c[k]); });
    put<A, kVector>(args, t, h, at, y, count);
  }
  template <class A, bool kVector>
  __device__ __forceinline__ void image(int64_t t, int64_t h, int at, int64_t count) const {
    put<A, kVector>(args, t, h, at, Pack{}, count);
  }
};

}  // namespace

// [T,n]; those of image tokens are not written.
void conv_norms_cuda(const char* name, const ConvForwardArgs& a, float* norms, int device,
                     void* stream) {
  if (a.tokens == 0) return;
  const auto size = static_cast<int64_t>(size_of(a.activation));
  const bool vector = a.hidden * size % 16 == 0 &&
                      is_vector(a.gated_value, size, a.value_token_stride, a.value_stream_stride);
  with_rows(a.activation, vector, [&](auto activation, auto vectors) {
    cuda::launch(name, device, stream, &conv_norms<decltype(activation), vectors()>,
                 dim3(cuda::blocks(a.tokens * a.streams)),
                 dim3(static_cast<unsigned>(row_threads(a.hidden, a.activation, kPacks))), 0, a,
                 norms);
  });
}

void conv_fwd_cuda(const ConvForwardArgs& a, float* norms, int device, void* stream) {
  constexpr const char* kName = "engram.conv_fwd";
  const auto size = static_cast<int64_t>(size_of(a.activation));
  conv_norms_cuda(kName, a, norms, device, stream);
  launch_conv(kName, device, stream, GatedValues{a, norms},
              is_vector(a.out, size, a.out_token_stride, a.out_stream_stride));
}

}  // namespace ehc::engram
