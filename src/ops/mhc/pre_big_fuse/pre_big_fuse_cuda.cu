// mhc.pre_big_fuse on CUDA (sm_80+): sums over splits, split, Sinkhorn, collapse, in one kernel.
//
//   mixes = r sum_s mul_s; pre, post = sigmoids, comb = Sinkhorn of the others
//   c = round(sum_i pre_i x_i), layer_input = c or round((c r') w), r' = 1 / sqrt(mean c^2 + eps)
//   partials F32[S,T,G,N] and F32[S,T,G]; x A[T,n,d]; layer_input A[T,d]; w W[d]; post F32[T,n],
//   comb F32[T,n,n]
//
// Bytes a token in 16-bit types: (2n+2)d + 4*S*G*(N+1) + 4n + 4n^2.
// Algorithm: post and comb, which nothing here reads, are made by blocks of their own, sixteen
// lanes (four streams) or a thread per token, spread among the others, so that every processor
// always has rows on their way. The others collapse: pre is made once per block and token while the
// streams are on their way. Without the norm they are cut as in pre_apply; with it a block has a
// token and keeps the rounded row in registers until its sum is known; what is too long for that it
// writes and reads back, each thread its own part. Class E with the operators it stands for, whose
// steps it shares; the sum of the norm is class R, its order depends on d and the type alone.
// Tokens are independent.
#include "backends/cuda/sums.cuh"
#include "ops/mhc/pre_apply/pre_apply_math.h"
#include "ops/mhc/pre_big_fuse/pre_big_fuse_args.h"
#include "ops/mhc/shared/token_lanes.cuh"

namespace ehc::mhc {

namespace {

// --- post and comb ---

// A token's, by one thread. A function of its own, to be compiled once.
template <int kStreams>
__device__ __noinline__ void make_token(const BigFuseArgs& a, int64_t t) {
  const int n = count_of<kStreams>(a.split.streams);
  float mixes[kRoom<kStreams> + kMatrixRoom<kStreams>];
  if (a.reduce.splits == 1) {
    reduce_mixes<true>(a.reduce, t, n, n + n * n, mixes);
  } else {
    reduce_mixes<false>(a.reduce, t, n, n + n * n, mixes);
  }
  float* post = a.split.post.data + t * a.split.post.token_stride;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    post[i] = split_post(a.split, LogitTerms(a.split, 1, n + i).logit(mixes[i]));
  }
  float logits[kMatrixRoom<kStreams>];
  float y[kMatrixRoom<kStreams>];
#pragma unroll
  for (int e = 0; e < n * n; ++e) {
    logits[e] = LogitTerms(a.split, 2, 2 * n + e).logit(mixes[n + e]);
  }
  sinkhorn_matrix<kStreams>(a.sinkhorn, SharedRounds<kStreams>{a.sinkhorn}, logits, y);
  store_matrix<kStreams>(y, t, n, a.comb);
}

// An element of comb, and of post in the first lanes of a token; four streams. Lanes of tokens that
// do not exist repeat the last one.
__device__ __forceinline__ void make_element(const BigFuseArgs& a, int64_t token, int e) {
  const int64_t t = min(token, a.collapse.sizes.tokens - 1);
  const int i = e % kLaneStreams;
  const LogitTerms of_post(a.split, 1, kLaneStreams + i);
  const LogitTerms of_comb(a.split, 2, 2 * kLaneStreams + e);
  float mixes[2];
  const int64_t numbers[2] = {kLaneStreams + i, 2 * kLaneStreams + e};
  if (a.reduce.splits == 1) {
    reduce_some<true>(a.reduce, t, numbers, mixes, KeepNothing{});
  } else {
    reduce_some<false>(a.reduce, t, numbers, mixes, KeepNothing{});
  }
  const float y = sinkhorn_lanes(a.sinkhorn, of_comb.logit(mixes[1]));
  if (t != token) return;
  if (e < kLaneStreams) {
    a.split.post.data[t * a.split.post.token_stride + i] =
        split_post(a.split, of_post.logit(mixes[0]));
  }
  a.comb.data[t * a.comb.token_stride + e / kLaneStreams * a.comb.row_stride + i] = y;
}

// How the `count` blocks that make coefficients lie among the others: every 2^shift-th is one, from
// the first on.
struct CoefficientBlocks {
  unsigned count;
  int shift;

  // They take no more than the first half of the grid, for they take longest.
  static CoefficientBlocks among(int64_t others, int64_t count) {
    int shift = 0;
    while ((count << (shift + 2)) <= others) ++shift;
    return {cuda::blocks(count), shift};
  }
  __device__ __forceinline__ bool has(unsigned block) const {
    return block >> shift < count && (block & ((1U << shift) - 1)) == 0;
  }
  // The number of a block among those that `has` is true (or false) for.
  __device__ __forceinline__ unsigned own(unsigned block) const { return block >> shift; }
  __device__ __forceinline__ unsigned other(unsigned block) const {
    return block - min((block >> shift) + 1, count);
  }
};

template <int kStreams>
__device__ __forceinline__ void make_coefficients(const BigFuseArgs& a, unsigned block) {
  const int threads = static_cast<int>(blockDim.x * blockDim.y);
  const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  const int n = count_of<kStreams>(a.split.streams);
  if (n != kLaneStreams) {
    const int64_t t = static_cast<int64_t>(block) * threads + thread;
    if (t < a.collapse.sizes.tokens) make_token<kStreams>(a, t);
    return;
  }
  const int tokens = threads / cuda::kWarp * (cuda::kWarp / kLanesOfToken);
  if (thread >= tokens * kLanesOfToken) return;  // not a whole warp
  make_element(a, static_cast<int64_t>(block) * tokens + thread / kLanesOfToken,
               thread % kLanesOfToken);
}

// --- the collapse ---

// pre of a token into `pre`, by the threads of a row of the block; for one split, or for several.
// The latter has calls, which wait for the loads before them, and so comes before the streams'
// loads.
template <bool kOne>
__device__ __forceinline__ void make_pre(const BigFuseArgs& a, int64_t t, int n, float* pre) {
  if ((a.reduce.splits == 1) != kOne || t >= a.collapse.sizes.tokens) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const LogitTerms terms(a.split, 0, i);
    float mix[1];
    reduce_some<kOne>(a.reduce, t, {i}, mix, KeepNothing{});
    pre[i] = split_pre(a.split, terms.logit(mix[0]));
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
// Blocks that are to fit on a multiprocessor: registers limit the rows on their way.
template <int kStreams>
inline constexpr int kResidentBlocks = kStreams == 0 ? 1 : 4;

template <class A, int kStreams, bool kVector>
__global__ void __launch_bounds__(kMostColumnThreads, kResidentBlocks<kStreams>)
    big_fuse(const __grid_constant__ BigFuseArgs a, CoefficientBlocks coefficients,
             int64_t column_blocks) {
  __shared__ float pre[kMostColumnThreads][kRoom<kStreams>];
  cuda::wait_for_previous();
  if (coefficients.has(blockIdx.x)) {
    return make_coefficients<kStreams>(a, coefficients.own(blockIdx.x));
  }
  const StreamSizes& sizes = a.collapse.sizes;
  const int n = count_of<kStreams>(sizes.streams);
  // Found again for the stores: kept, it would take registers of rows on their way.
  const auto find_place = [&] {
    unsigned block = 0;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return Place::of_thread<A>(sizes, column_blocks, coefficients.other(block), kPacks);
  };
  const int64_t step = blockDim.x * kWidth<A>;
  Pack x[kPacks][kRoom<kStreams>];
  {
    const Place at = find_place();
    make_pre<false>(a, at.token, n, pre[threadIdx.y]);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int64_t count = at.count - p * step;
      if (count <= 0) continue;
      load_streams<kStreams, kVector, A>(a.collapse.residual, at.token, at.column + p * step, count,
                                         n, x[p]);
    }
    make_pre<true>(a, at.token, n, pre[threadIdx.y]);
  }
  __syncthreads();
  const Place at = find_place();
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t count = at.count - p * step;
    if (count <= 0) continue;
    cuda::store_pack<kVector>(row_of<A>(a.collapse.layer_input, at.token) + at.column + p * step,
                              collapsed<A, kStreams>(pre[threadIdx.y], x[p], n), count);
  }
}

// --- with the norm ---

// Packs of a thread that stay in registers, for d up to 256 times so many.
constexpr int kKept = 4;

template <class A>
__device__ __forceinline__ void add_squares(const Pack& row, int64_t count, float& sum) {
#pragma unroll
  for (int k = 0; k < kWidth<A>; ++k) {
    // Columns that do not exist are zeros in every stream; 0 * inf would not be.
    const float c = k < count ? column<A>(row, k) : 0.0f;
    sum = fmaf(c, c, sum);
  }
}

// Weights of the columns of a pack.
template <class A>
struct NormWeights {
  float value[kWidth<A>];

  template <bool kVector>
  __device__ __forceinline__ void load(const LayerNormArgs& norm, int64_t at, int64_t count) {
    if (norm.weight_type == DType::f32) {
      load_as<kVector, float>(norm, at, count);
    } else {
      load_as<kVector, cuda::Bf16>(norm, at, count);
    }
  }
  __device__ __forceinline__ Pack of(const Pack& row, float factor) const {
    return cuda::make_pack<A>([&](int k) { return column<A>(row, k) * factor * value[k]; });
  }

 private:
  // In packs of the rows' columns, which may be two of the weights, or half a one.
  template <bool kVector, class W>
  __device__ __forceinline__ void load_as(const LayerNormArgs& norm, int64_t at, int64_t count) {
    const auto* from = static_cast<const W*>(norm.weight) + at;
    if constexpr (kWidth < W >> kWidth<A>) {
#pragma unroll
      for (int k = 0; k < kWidth<A>; ++k) {
        value[k] = k < count ? column<W>(cuda::load_pack<false>(from + k, 1), 0) : 0.0f;
      }
    } else {
#pragma unroll
      for (int first = 0; first < kWidth<A>; first += kWidth<W>) {
        const Pack pack = cuda::load_pack<kVector>(from + first, count - first);
#pragma unroll
        for (int k = 0; k < kWidth<W>; ++k) value[first + k] = column<W>(pack, k);
      }
    }
  }
};

template <class A, int kStreams, bool kVector>
__global__ void __launch_bounds__(kMostRowThreads, kStreams == 0 ? 1 : 3)
    big_fuse_norm(const __grid_constant__ BigFuseArgs a, CoefficientBlocks coefficients) {
  __shared__ float pre[kRoom<kStreams>], squares;
  __shared__ cuda::SumRoom<1, kMostRowThreads> room;
  cuda::wait_for_previous();
  if (coefficients.has(blockIdx.x)) {
    return make_coefficients<kStreams>(a, coefficients.own(blockIdx.x));
  }
  const StreamSizes& sizes = a.collapse.sizes;
  const int n = count_of<kStreams>(sizes.streams);
  const int64_t t = coefficients.other(blockIdx.x);
  A* row = row_of<A>(a.collapse.layer_input, t);
  const int64_t first = threadIdx.x * kWidth<A>;
  const int64_t step = blockDim.x * kWidth<A>;
  Pack x[kPacks][kRoom<kStreams>];
  const auto read = [&](int p, Pack(&to)[kRoom<kStreams>]) {
    const int64_t at = first + p * step;
    if (at >= sizes.hidden) return;
    load_streams<kStreams, kVector, A>(a.collapse.residual, t, at, sizes.hidden - at, n, to);
  };
  make_pre<false>(a, t, n, pre);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) read(p, x[p]);
  make_pre<true>(a, t, n, pre);
  __syncthreads();
  Pack kept[kKept];
  float sum[1] = {};
#pragma unroll
  for (int p = 0; p < kKept; ++p) {
    const int64_t at = first + p * step;
    if (at >= sizes.hidden) continue;
    kept[p] = collapsed<A, kStreams>(pre, x[p % kPacks], n);
    if (p + kPacks < kKept) read(p + kPacks, x[p % kPacks]);
    add_squares<A>(kept[p], sizes.hidden - at, sum[0]);
  }
  for (int64_t at = first + kKept * step; at < sizes.hidden; at += step) {
    load_streams<kStreams, kVector, A>(a.collapse.residual, t, at, sizes.hidden - at, n, x[0]);
    const Pack made = collapsed<A, kStreams>(pre, x[0], n);
    add_squares<A>(made, sizes.hidden - at, sum[0]);
    cuda::store_pack<kVector>(row + at, made, sizes.hidden - at);
  }
  NormWeights<A> weights[kKept];
#pragma unroll
  for (int p = 0; p < kKept; ++p) {
    const int64_t at = first + p * step;
    if (at < sizes.hidden) weights[p].template load<kVector>(a.norm, at, sizes.hidden - at);
  }
  cuda::block_sums(sum, room, [&](int, float total) { squares = total; });
  __syncthreads();
  const float factor = rms_factor<float>({sizes.hidden, a.norm.eps, false}, squares);
#pragma unroll
  for (int p = 0; p < kKept; ++p) {
    const int64_t at = first + p * step;
    const int64_t count = sizes.hidden - at;
    if (count <= 0) continue;
    cuda::store_pack<kVector>(row + at, weights[p].of(kept[p], factor), count);
  }
  for (int64_t at = first + kKept * step; at < sizes.hidden; at += step) {
    const int64_t count = sizes.hidden - at;
    const Pack made = cuda::load_pack<kVector>(static_cast<const A*>(row + at), count);
    weights[0].template load<kVector>(a.norm, at, count);
    cuda::store_pack<kVector>(row + at, weights[0].of(made, factor), count);
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
    cut.block = dim3(static_cast<unsigned>(row_threads(sizes, kKept)));
  } else {
    // A warp at least, for coefficients; rows beyond T have no work.
    constexpr unsigned kLeast = cuda::kWarp;
    cut.block.y = std::max(cut.block.y, (kLeast + cut.block.x - 1) / cut.block.x);
    cut.grid.x = cuda::blocks((sizes.tokens + cut.block.y - 1) / cut.block.y * cut.column_blocks);
  }
  const int64_t warps = cut.block.x * cut.block.y / cuda::kWarp;
  const int64_t of_block = sizes.streams == kLaneStreams ? warps * (cuda::kWarp / kLanesOfToken)
                                                         : cut.block.x * cut.block.y;
  const auto coefficients =
      CoefficientBlocks::among(cut.grid.x, (sizes.tokens + of_block - 1) / of_block);
  const dim3 grid(cuda::blocks(int64_t{cut.grid.x} + coefficients.count));
  const bool vectors = are_vectors(sizes, a.collapse.residual, a.collapse.layer_input) &&
                       reinterpret_cast<uintptr_t>(a.norm.weight) % 16 == 0;
  with_kernel(sizes, vectors, [&](auto activation, auto streams, auto vector) {
    using A = decltype(activation);
    if (normalises) {
      return cuda::launch_overlapping(kName, device, stream, &big_fuse_norm<A, streams(), vector()>,
                                      grid, cut.block, 0, a, coefficients);
    }
    cuda::launch_overlapping(kName, device, stream, &big_fuse<A, streams(), vector()>, grid,
                             cut.block, 0, a, coefficients, cut.column_blocks);
  });
}

}  // namespace ehc::mhc
