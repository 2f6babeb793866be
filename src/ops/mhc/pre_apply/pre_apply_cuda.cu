// mhc.pre_apply_fwd and mhc.pre_apply_bwd on CUDA (sm_80+), and mhc.expand_bwd.
//
//   o = round(sum_i pre_i x_i)
//   grad_x_i = round(target_i + pre_i g)    grad_pre_i = sum over d of g x_i
//   x, target, grad_x A[T,n,d]; o, g A[T,d]; pre, grad_pre F32[T,n]
//
// Bytes a token in 16-bit types: forward (2n+2)d, backward (4n+2)d, with a target (6n+2)d.
// Algorithm: the forward has a thread per 16 bytes of a token's columns, which reads them of all
// streams before it adds. The backward has a block per token; a thread takes its packs in turn,
// writes their gradients at once and keeps the n sums in registers until the end.
// Activations are class E, grad_pre is class R: its order depends on d and the type alone. Tokens
// are independent.
#include "backends/cuda/sums.cuh"
#include "ops/mhc/pre_apply/pre_apply_args.h"
#include "ops/mhc/pre_apply/pre_apply_math.h"
#include "ops/mhc/shared/stream_rows.cuh"

namespace ehc::mhc {

namespace {

// kOnes: all coefficients are 1.
template <class A, int kStreams, bool kVector, bool kOnes>
__global__ void pre_apply_fwd(const __grid_constant__ PreApplyForwardArgs a,
                              int64_t column_blocks) {
  cuda::wait_for_previous();
  const Place at = Place::of_thread<A>(a.sizes, column_blocks);
  if (at.count <= 0) return;
  const int n = count_of<kStreams>(a.sizes.streams);
  Pack x[kRoom<kStreams>];
  load_streams<kStreams, kVector, A>(a.residual, at.token, at.column, at.count, n, x);
  const auto collapse = [&](const auto& pre) {
    const Pack sum = cuda::make_pack<A>([&](int k) {
      return pre_apply_column<float>(pre, n, [&](int64_t i) { return column<A>(x[i], k); });
    });
    cuda::store_pack<kVector>(row_of<A>(a.layer_input, at.token) + at.column, sum, at.count);
  };
  if constexpr (kOnes) {
    collapse([](int64_t) { return 1.0f; });
  } else {
    const StreamVector<kStreams, kVector> pre(a.pre, at.token, n);
    collapse([&](int64_t i) { return pre[i]; });
  }
}

template <class A, int kStreams, bool kVector>
__global__ void __launch_bounds__(kMostRowThreads)
    pre_apply_bwd(const __grid_constant__ PreApplyBackwardArgs a) {
  cuda::wait_for_previous();
  constexpr int kCount = kRoom<kStreams>;
  __shared__ cuda::SumRoom<kCount, kMostRowThreads> room;
  const int64_t t = blockIdx.x;
  const int n = count_of<kStreams>(a.sizes.streams);
  const bool adds = a.grad_residual_acc.data != nullptr;
  const StreamVector<kStreams, kVector> pre(a.pre, t, n);
  float sums[kCount] = {};
  for (int64_t at = threadIdx.x * kWidth<A>; at < a.sizes.hidden; at += blockDim.x * kWidth<A>) {
    const int64_t count = a.sizes.hidden - at;
    const Pack grad = cuda::load_pack<kVector>(row_of<const A>(a.grad_layer_input, t) + at, count);
    Pack x[kCount], target[kCount] = {};
    load_streams<kStreams, kVector, A>(a.residual, t, at, count, n, x);
    if (adds) load_streams<kStreams, kVector, A>(a.grad_residual_acc, t, at, count, n, target);
    each_stream(n, [&](int i) {
      const Pack grad_x = cuda::make_pack<A>([&](int k) {
        const float g = column<A>(grad, k);
        sums[i] = fmaf(g, column<A>(x[i], k), sums[i]);
        return fmaf(pre[i], g, column<A>(target[i], k));
      });
      cuda::store_pack<kVector>(row_of<A>(a.grad_residual, t, i) + at, grad_x, count);
    });
  }
  cuda::block_sums(sums, room, [&](int i, float sum) {
    if (i < n) a.grad_pre.data[t * a.grad_pre.token_stride + i] = sum;
  });
}

constexpr int kBackwardPacks = 2;  // of a thread, for d up to 256 times so many

template <bool kOnes>
void collapse(const char* name, const PreApplyForwardArgs& a, int device, void* stream) {
  const bool vectors = are_vectors(a.sizes, a.residual, a.layer_input) && are_lines(a.sizes, a.pre);
  with_kernel(a.sizes, vectors, [&](auto activation, auto streams, auto vector) {
    launch_columns_overlapping(name, device, stream, a.sizes,
                               &pre_apply_fwd<decltype(activation), streams(), vector(), kOnes>, a);
  });
}

}  // namespace

void pre_apply_fwd_cuda(const PreApplyForwardArgs& a, int device, void* stream) {
  collapse<false>("mhc.pre_apply_fwd", a, device, stream);
}

void expand_bwd_cuda(const PreApplyForwardArgs& a, int device, void* stream) {
  collapse<true>("mhc.expand_bwd", a, device, stream);
}

void pre_apply_bwd_cuda(const PreApplyBackwardArgs& a, int device, void* stream) {
  const bool vectors =
      are_vectors(a.sizes, a.grad_layer_input, a.residual, a.grad_residual_acc, a.grad_residual) &&
      are_lines(a.sizes, a.pre);
  with_kernel(a.sizes, vectors, [&](auto activation, auto streams, auto vector) {
    launch_rows_overlapping("mhc.pre_apply_bwd", device, stream, a.sizes, kBackwardPacks,
                            &pre_apply_bwd<decltype(activation), streams(), vector()>, a);
  });
}

}  // namespace ehc::mhc
