// engram.gate_fwd on CUDA (sm_80+).
//
//   alpha[t,h] = sigmoid(signed_root(D * rx * rk / sqrt(d))), out[t,h,:] = round(x + alpha * v)
//   x, k, out A[T,n,d]; v A[T,d]; wf F32[n,d]
//
// Bytes: (6n+2)d a token in 16-bit types: x, k, v read once, out written once; n-1 of n reads of v
// and wf come from the caches where a block has a stream.
// Algorithm: many tokens of four streams are walked over by blocks that read every row once
// (gate_walk.cuh). Few tokens, other numbers of streams, statistics alone, and rows that are not
// aligned or do not fit have a block per token and stream, which holds its rows between the sums
// and their use. Class R: the order of sums depends on d and the type alone, whatever is saved and
// wherever the output is. Tokens are independent.
#include "ops/engram/shared/gate_walk.cuh"

namespace ehc::engram {

namespace {

template <class A, bool kVector>
__device__ __noinline__ void image_token(const GateForwardArgs& a, int64_t t, int64_t h) {
  if (threadIdx.x == 0) {
    save(a, t, h, GateScalars{});
    if (h == 0 && a.value_mean_square != nullptr) a.value_mean_square[t] = 0;
  }
  if (a.mode == GateMode::stats) return;
  A* out = out_row<A>(a, t, h);
  if (a.mode == GateMode::value) {
    zero_row<kVector>(out, a.hidden);
  } else {
    copy_row<kVector>(residual_row<A>(a, t, h), out, a.hidden);
  }
}

template <class A, bool kVector>
__global__ void __launch_bounds__(kRowThreads)
    gate_fwd(const __grid_constant__ GateForwardArgs a, float scale) {
  cuda::wait_for_previous();
  constexpr int kColumns = kWidth<A>;
  __shared__ WarpSums<GateSums::kCount> sums;
  __shared__ float shared_alpha;
  const auto streams = static_cast<unsigned>(a.streams);
  const int64_t t = blockIdx.x / streams;
  const int64_t h = blockIdx.x % streams;
  if (is_image(a.image_token_mask, t)) return image_token<A, kVector>(a, t, h);

  const A* residual = residual_row<A>(a, t, h);
  const A* key = key_row<A>(a, t, h);
  const A* value = value_row<A>(a, t);
  const float* weight = a.weight_fused + h * a.weight_stream_stride;
  const bool writes = a.mode != GateMode::stats;
  const bool squares = h == 0 && a.value_mean_square != nullptr;
  const int64_t step = blockDim.x * kColumns;
  const int64_t first = threadIdx.x * kColumns;

  GateSums of_thread;
  const auto add = [&](int64_t at, const Pack& x, const Pack& k, const Pack& v) {
    float w[kColumns];
    load_weights<kColumns, kVector>(weight + at, a.hidden - at, w);
    of_thread.add<A>(x, k, w);
    if (squares) of_thread.add_value<A>(v);
  };
  Pack x[kGatePacks] = {}, k[kGatePacks] = {}, v[kGatePacks] = {};
#pragma unroll
  for (int p = 0; p < kGatePacks; ++p) {
    const int64_t at = first + p * step;
    if (at >= a.hidden) continue;
    x[p] = load_passing<kVector>(residual + at, a.hidden - at);
    k[p] = load_passing<kVector>(key + at, a.hidden - at);
    v[p] = load_passing<kVector>(value + at, a.hidden - at);
  }
#pragma unroll
  for (int p = 0; p < kGatePacks; ++p) {
    const int64_t at = first + p * step;
    if (at < a.hidden) add(at, x[p], k[p], v[p]);
  }
  for (int64_t at = first + kGatePacks * step; at < a.hidden; at += step) {
    const int64_t count = a.hidden - at;
    add(at, load_passing<kVector>(residual + at, count), load_passing<kVector>(key + at, count),
        load_passing<kVector>(value + at, count));
  }

  sums.put(of_thread.sum);
  __syncthreads();
  if (threadIdx.x < cuda::kWarp) {
    const GateScalars s = gate_scalars(sums.total(0), sums.total(1), sums.total(2), a, scale);
    const float value_squares = squares ? sums.total(3) : 0.0f;
    if (threadIdx.x == 0) {
      shared_alpha = s.alpha;
      save(a, t, h, s);
      if (squares) a.value_mean_square[t] = value_squares / static_cast<float>(a.hidden);
    }
  }
  if (!writes) return;
  __syncthreads();

  const float alpha = shared_alpha;
#pragma unroll
  for (int p = 0; p < kGatePacks; ++p) keep_packed(x[p]), keep_packed(v[p]);
  A* out = out_row<A>(a, t, h);
#pragma unroll
  for (int p = 0; p < kGatePacks; ++p) {
    const int64_t at = first + p * step;
    if (at >= a.hidden) continue;
    cuda::store_pack<kVector>(out + at, gated<A>(a, alpha, x[p], v[p]), a.hidden - at);
  }
  for (int64_t at = first + kGatePacks * step; at < a.hidden; at += step) {
    const int64_t count = a.hidden - at;
    const Pack again = load_passing<kVector>(residual + at, count);
    cuda::store_pack<kVector>(
        out + at, gated<A>(a, alpha, again, load_passing<kVector>(value + at, count)), count);
  }
}

}  // namespace

void gate_fwd_cuda(const GateForwardArgs& a, int device, void* stream) {
  if (a.tokens == 0) return;
  const auto size = static_cast<int64_t>(size_of(a.activation));
  const bool vector =
      are_vectors(a) && (a.mode == GateMode::stats ||
                         is_vector(a.out, size, a.out_token_stride, a.out_stream_stride));
  with_rows(a.activation, vector, [&](auto activation, auto vectors) {
    using A = decltype(activation);
    if (vectors() && walk_gate<A>(a, device, stream)) return;
    cuda::launch_overlapping("engram.gate_fwd", device, stream, &gate_fwd<A, vectors()>,
                             dim3(cuda::blocks(a.tokens * a.streams)),
                             dim3(static_cast<unsigned>(gate_threads(a))), 0, a,
                             gate_scale<float>(a.hidden));
  });
}

}  // namespace ehc::engram
