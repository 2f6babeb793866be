// mhc.post_fwd and mhc.post_bwd on CUDA (sm_80+).
//
//   x'_o = round(c_o y + sum_i a_io b_i)
//   grad_y = round(sum_o c_o g_o)      grad_c_o = sum over d of y g_o
//   grad_b_i = round(sum_o a_io g_o)   grad_a_io = sum over d of b_i g_o
//   b, x', grad_b, g A[T,n,d]; y, grad_y A[T,d]; c, grad_c F32[T,n]; a, grad_a F32[T,n,n]
//
// Bytes a token in 16-bit types: forward (4n+2)d, backward (6n+4)d.
// Algorithm: the forward has a thread per 16 bytes of a token's columns, which reads them of all
// streams before it writes any. The backward has a block per token; a thread takes its packs in
// turn, writes their gradients at once and keeps the n^2+n sums in registers until the end.
// Activations are class E, grad_c and grad_a class R: their order depends on d and the type alone.
// Tokens are independent.
#include "backends/cuda/sums.cuh"
#include "ops/mhc/post/post_args.h"
#include "ops/mhc/post/post_math.h"
#include "ops/mhc/shared/stream_rows.cuh"

namespace ehc::mhc {

namespace {

template <class A, int kStreams, bool kVector>
__global__ void __launch_bounds__(kMostColumnThreads, kStreams == 0 ? 2 : 3)
    post_fwd(const __grid_constant__ PostForwardArgs a, int64_t column_blocks) {
  cuda::wait_for_previous();
  const Place at = Place::of_thread<A>(a.sizes, column_blocks);
  if (at.count <= 0) return;
  const int n = count_of<kStreams>(a.sizes.streams);
  const StreamVector<kStreams, kVector> post(a.post, at.token, n);
  const StreamMatrix<kStreams, kVector> comb(a.comb, at.token, n);
  Pack residual[kRoom<kStreams>];
  load_streams<kStreams, kVector, A>(a.residual, at.token, at.column, at.count, n, residual);
  const A* layer_output = row_of<const A>(a.layer_output, at.token) + at.column;
  const Pack y = cuda::load_pack<kVector>(layer_output, at.count);
  each_stream(n, [&](int o) {
    const Pack x = cuda::make_pack<A>([&](int k) {
      return post_column<float>(
          post[o], [&](int64_t i) { return comb[i][o]; }, n, column<A>(y, k),
          [&](int64_t i) { return column<A>(residual[i], k); });
    });
    cuda::store_pack<kVector>(row_of<A>(a.new_residual, at.token, o) + at.column, x, at.count);
  });
}

// A row with coefficients in the new streams, y or a b_i: its gradient at the columns of a pack,
// and their part of the gradients of its coefficients.
template <class A, int kStreams>
__device__ __forceinline__ Pack mixed_row(const Pack& row, const float* coefficients,
                                          const float (*grads)[kWidth<A>], int n, float* sums) {
  return cuda::make_pack<A>([&](int k) {
    const float x = column<A>(row, k);
    float grad = 0;
#pragma unroll
    for (int o = 0; o < n; ++o) {
      sums[o] = fmaf(x, grads[o][k], sums[o]);
      grad = fmaf(coefficients[o], grads[o][k], grad);
    }
    return grad;
  });
}

// G: the type of the gradient of the new streams, A or float.
template <class A, class G, int kStreams, bool kVector>
__global__ void __launch_bounds__(kMostRowThreads)
    post_bwd(const __grid_constant__ PostBackwardArgs a) {
  constexpr int kCount = kRoom<kStreams> * (kRoom<kStreams> + 1);
  __shared__ cuda::SumRoom<kCount, kMostRowThreads> room;
  const int64_t t = blockIdx.x;
  const int n = count_of<kStreams>(a.sizes.streams);
  const StreamVector<kStreams> post(a.post, t, n);
  const StreamMatrix<kStreams> comb(a.comb, t, n);
  float sums[kCount] = {};
  for (int64_t at = threadIdx.x * kWidth<A>; at < a.sizes.hidden; at += blockDim.x * kWidth<A>) {
    const int64_t count = a.sizes.hidden - at;
    constexpr int kPacks = kWidth<A> / kWidth<G>;
    Pack grad[kPacks][kRoom<kStreams>], residual[kRoom<kStreams>];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      load_streams<kStreams, kVector, G>(a.grad_new_residual.rows, t, at + p * kWidth<G>,
                                         count - p * kWidth<G>, n, grad[p]);
    }
    const Pack y = cuda::load_pack<kVector>(row_of<const A>(a.layer_output, t) + at, count);
    load_streams<kStreams, kVector, A>(a.residual, t, at, count, n, residual);
    float grads[kRoom<kStreams>][kWidth<A>];
#pragma unroll
    for (int o = 0; o < n; ++o) {
#pragma unroll
      for (int k = 0; k < kWidth<A>; ++k) {
        grads[o][k] = column<G>(grad[k / kWidth<G>][o], k % kWidth<G>);
      }
    }
    cuda::store_pack<kVector>(row_of<A>(a.grad_layer_output, t) + at,
                              mixed_row<A, kStreams>(y, post.value, grads, n, sums), count);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      cuda::store_pack<kVector>(
          row_of<A>(a.grad_residual, t, i) + at,
          mixed_row<A, kStreams>(residual[i], comb[i], grads, n, sums + (i + 1) * kRoom<kStreams>),
          count);
    }
  }
  cuda::block_sums(sums, room, [&](int k, float sum) {
    const int row = k / kRoom<kStreams>;
    const int o = k % kRoom<kStreams>;
    if (row > n || o >= n) return;
    float* to = row == 0 ? a.grad_post.data + t * a.grad_post.token_stride
                         : a.grad_comb.data + t * a.grad_comb.token_stride +
                               (row - 1) * a.grad_comb.row_stride;
    to[o] = sum;
  });
}

constexpr int kBackwardPacks = 2;  // of a thread, for d up to 256 times so many

}  // namespace

void post_fwd_cuda(const PostForwardArgs& a, int device, void* stream) {
  const bool vectors = are_vectors(a.sizes, a.layer_output, a.residual, a.new_residual) &&
                       are_lines(a.sizes, a.post, a.comb);
  with_kernel(a.sizes, vectors, [&](auto activation, auto streams, auto vector) {
    launch_columns_overlapping("mhc.post_fwd", device, stream, a.sizes,
                               &post_fwd<decltype(activation), streams(), vector()>, a);
  });
}

void post_bwd_cuda(const PostBackwardArgs& a, int device, void* stream) {
  const GradientRows& grad = a.grad_new_residual;
  StreamSizes of_grad = a.sizes;
  if (grad.is_f32) of_grad.activation = DType::f32;
  const bool vectors =
      are_vectors(of_grad, grad.rows) &&
      are_vectors(a.sizes, a.layer_output, a.residual, a.grad_layer_output, a.grad_residual);
  with_kernel(a.sizes, vectors, [&](auto activation, auto streams, auto vector) {
    using A = decltype(activation);
    const auto start = [&](auto kernel) {
      launch_rows("mhc.post_bwd", device, stream, a.sizes, kBackwardPacks, kernel, a);
    };
    if (grad.is_f32) return start(&post_bwd<A, float, streams(), vector()>);
    start(&post_bwd<A, A, streams(), vector()>);
  });
}

}  // namespace ehc::mhc
