// mhc.pre_big_fuse on CUDA (sm_80+): sums over splits, split, Sinkhorn, collapse, in one kernel.
//
//   mixes = r sum_s mul_s; pre, post = sigmoids, comb = Sinkhorn of the others
//   c = round(sum_i pre_i x_i), layer_input = c or round((c r') w), r' = 1 / sqrt(mean c^2 + eps)
//   partials F32[S,T,G,N] and F32[S,T,G]; x A[T,n,d]; layer_input A[T,d]; w W[d]; post F32[T,n],
//   comb F32[T,n,n]
//
// Bytes a token in 16-bit types: (2n+2)d + 4*S*G*(N+1) + 4n + 4n^2.
// Algorithm: post and comb, which nothing here reads, are made by the first blocks, a thread per
// token, and hide behind the others. Those collapse: pre is made once per block and token while
// the streams are on their way. Without the norm they are cut as in pre_apply; with it a block has
// a token, writes the rounded row, and reads it back for the second pass, each thread its own part.
// Class E with the operators it stands for, whose steps it shares; the sum of the norm is class R,
// its order depends on d and the type alone. Tokens are independent.
#include "backends/cuda/sums.cuh"
#include "core/float_formats.h"
#include "ops/mhc/pre_apply/pre_apply_math.h"
#include "ops/mhc/pre_big_fuse/pre_big_fuse_args.h"
#include "ops/mhc/shared/token_steps.cuh"

namespace ehc::mhc {

namespace {

// post and comb of a token. A function of its own, to be compiled once; what follows the load of
// the streams must have no calls, for they would wait for it.
template <int kStreams>
__device__ __noinline__ void make_post_and_comb(const BigFuseArgs& a, int64_t t) {
  const int n = count_of<kStreams>(a.split.streams);
  float mixes[kRoom<kStreams> + kMatrixRoom<kStreams>];
  reduce_mixes(a.reduce, t, n, n + n * n, mixes);
  float* post = a.split.post.data + t * a.split.post.token_stride;
#pragma unroll
  for (int i = 0; i < n; ++i) post[i] = split_post(a.split, i, mixes[i]);
  float logits[kMatrixRoom<kStreams>];
  float y[kMatrixRoom<kStreams>];
#pragma unroll
  for (int e = 0; e < n * n; ++e) logits[e] = split_comb(a.split, e, mixes[n + e]);
  sinkhorn_matrix<kStreams>(a.sinkhorn, SharedRounds<kStreams>{a.sinkhorn}, logits, y);
  store_matrix<kStreams>(y, t, n, a.comb);
}

// Row `row` of comb and that entry of post, for four streams.
__device__ __forceinline__ void make_row(const BigFuseArgs& a, int64_t t, int row, int lane) {
  float mix = 0;
  float logits[kQuad];
  float y[kQuad];
  reduce_mixes(a.reduce, t, kQuad + row, 1, &mix);
  reduce_mixes(a.reduce, t, 2 * kQuad + row * kQuad, kQuad, logits);
  a.split.post.data[t * a.split.post.token_stride + row] = split_post(a.split, row, mix);
#pragma unroll
  for (int o = 0; o < kQuad; ++o) logits[o] = split_comb(a.split, row * kQuad + o, logits[o]);
  sinkhorn_quad(a.sinkhorn, lane, logits, y);
  float* to = a.comb.data + t * a.comb.token_stride + row * a.comb.row_stride;
#pragma unroll
  for (int o = 0; o < kQuad; ++o) to[o] = y[o];
}

// Threads of a token's coefficients; four streams on logarithms leave all but one idle.
template <int kStreams>
inline constexpr int kTokenThreads = kStreams == kQuad ? kQuad : 1;

// Does the block make coefficients of tokens? There are `blocks` such, before the others.
template <int kStreams>
__device__ __forceinline__ bool makes_coefficients(const BigFuseArgs& a, unsigned blocks) {
  if (blockIdx.x >= blocks) return false;
  constexpr int kThreads = kTokenThreads<kStreams>;
  const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  const int tokens = static_cast<int>(blockDim.x * blockDim.y) / kThreads;  // of a block
  const int64_t t = static_cast<int64_t>(blockIdx.x) * tokens + thread / kThreads;
  if (thread >= tokens * kThreads || t >= a.collapse.sizes.tokens) return true;
  if constexpr (kStreams == kQuad) {
    if (a.sinkhorn.form != SinkhornForm::log) {
      make_row(a, t, thread % kQuad, thread % cuda::kWarp);
      return true;
    }
  }
  if (thread % kThreads == 0) make_post_and_comb<kStreams>(a, t);
  return true;
}

// pre of a token into `pre`, by the threads of a row of the block.
__device__ __forceinline__ void make_pre(const BigFuseArgs& a, int64_t t, int n, float* pre) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    float mix = 0;
    reduce_mixes(a.reduce, t, i, 1, &mix);
    pre[i] = split_pre(a.split, i, mix);
  }
}

template <class A, int kStreams>
__device__ __forceinline__ Pack collapsed(const float* pre, const Pack* x, int n) {
  return cuda::make_pack<A>([&](int k) {
    return pre_apply_column<float>([&](int64_t i) { return pre[i]; }, n,
                                   [&](int64_t i) { return column<A>(x[i], k); });
  });
}

// Packs of a thread, side by side at the width of the block, so that pre is made for more of them.
constexpr int kPacks = 2;

template <class A, int kStreams, bool kVector>
__global__ void __launch_bounds__(kMostColumnThreads)
    big_fuse(const __grid_constant__ BigFuseArgs a, unsigned coefficient_blocks,
             int64_t column_blocks) {
  __shared__ float pre[kMostColumnThreads][kRoom<kStreams>];
  if (makes_coefficients<kStreams>(a, coefficient_blocks)) return;
  const StreamSizes& sizes = a.collapse.sizes;
  const int n = count_of<kStreams>(sizes.streams);
  const Place at =
      Place::of_thread<A>(sizes, column_blocks, blockIdx.x - coefficient_blocks, kPacks);
  const int64_t step = blockDim.x * kWidth<A>;
  Pack x[kPacks][kRoom<kStreams>];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t count = at.count - p * step;
    if (count <= 0) continue;
    load_streams<kStreams, kVector, A>(a.collapse.residual, at.token, at.column + p * step, count,
                                       n, x[p]);
  }
  if (at.token < sizes.tokens) make_pre(a, at.token, n, pre[threadIdx.y]);
  __syncthreads();
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t count = at.count - p * step;
    if (count <= 0) continue;
    cuda::store_pack<kVector>(row_of<A>(a.collapse.layer_input, at.token) + at.column + p * step,
                              collapsed<A, kStreams>(pre[threadIdx.y], x[p], n), count);
  }
}

template <class A, int kStreams, bool kVector>
__global__ void __launch_bounds__(kMostRowThreads)
    big_fuse_norm(const __grid_constant__ BigFuseArgs a, unsigned coefficient_blocks) {
  __shared__ float pre[kRoom<kStreams>], squares;
  __shared__ cuda::SumRoom<1, kMostRowThreads> room;
  if (makes_coefficients<kStreams>(a, coefficient_blocks)) return;
  const StreamSizes& sizes = a.collapse.sizes;
  const int n = count_of<kStreams>(sizes.streams);
  const int64_t t = blockIdx.x - coefficient_blocks;
  A* row = row_of<A>(a.collapse.layer_input, t);
  make_pre(a, t, n, pre);
  __syncthreads();
  const int64_t step = blockDim.x * kWidth<A>;
  float sum[1] = {};
  for (int64_t at = threadIdx.x * kWidth<A>; at < sizes.hidden; at += step) {
    Pack x[kRoom<kStreams>];
    load_streams<kStreams, kVector, A>(a.collapse.residual, t, at, sizes.hidden - at, n, x);
    const Pack made = collapsed<A, kStreams>(pre, x, n);
#pragma unroll
    for (int k = 0; k < kWidth<A>; ++k) {
      // Columns that do not exist are zeros in every stream; 0 * inf would not be.
      const float c = at + k < sizes.hidden ? column<A>(made, k) : 0.0f;
      sum[0] = fmaf(c, c, sum[0]);
    }
    cuda::store_pack<kVector>(row + at, made, sizes.hidden - at);
  }
  cuda::block_sums(sum, room, [&](int, float total) { squares = total; });
  __syncthreads();
  const float factor = rms_factor<float>({sizes.hidden, a.norm.eps, false}, squares);
  for (int64_t at = threadIdx.x * kWidth<A>; at < sizes.hidden; at += step) {
    const int64_t count = sizes.hidden - at;
    const Pack made = cuda::load_pack<kVector>(static_cast<const A*>(row + at), count);
    const Pack scaled = cuda::make_pack<A>([&](int k) {
      const float weight = k < count ? load_float(a.norm.weight, a.norm.weight_type, at + k) : 0.0f;
      return column<A>(made, k) * factor * weight;
    });
    cuda::store_pack<kVector>(row + at, scaled, count);
  }
}

}  // namespace

void pre_big_fuse_cuda(const BigFuseArgs& a, int device, void* stream) {
  constexpr const char* kName = "mhc.pre_big_fuse";
  const StreamSizes& sizes = a.collapse.sizes;
  if (sizes.tokens == 0) return;
  const bool normalises = a.norm.weight != nullptr;
  ColumnCut cut = cut_columns(sizes, kPacks);
  if (normalises) {
    cut.grid = dim3(cuda::blocks(sizes.tokens));
    cut.block = dim3(static_cast<unsigned>(row_threads(sizes, 2)));
  } else {
    // Room for the coefficients of a token at least; rows beyond T have no work.
    cut.block.y = std::max(cut.block.y, static_cast<unsigned>(kQuad) / cut.block.x + 1);
  }
  with_kernel(sizes, are_vectors(sizes, a.collapse.residual, a.collapse.layer_input),
              [&](auto activation, auto streams, auto vector) {
                using A = decltype(activation);
                const int64_t of_block = cut.block.x * cut.block.y / kTokenThreads<streams()>;
                const unsigned extra = cuda::blocks((sizes.tokens + of_block - 1) / of_block);
                const dim3 grid(cuda::blocks(int64_t{cut.grid.x} + extra));
                if (normalises) {
                  return cuda::launch(kName, device, stream, &big_fuse_norm<A, streams(), vector()>,
                                      grid, cut.block, 0, a, extra);
                }
                cuda::launch(kName, device, stream, &big_fuse<A, streams(), vector()>, grid,
                             cut.block, 0, a, extra, cut.column_blocks);
              });
}

}  // namespace ehc::mhc
