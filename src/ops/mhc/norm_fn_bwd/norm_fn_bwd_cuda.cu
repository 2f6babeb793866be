// mhc.norm_fn_bwd on CUDA (sm_80+).
//
//   grad_x[t,k] = round(target + (sum_j m[t,j] fn[j,k] + 2 x[t,k] q[t]))
//   grad_fn[j,k] = target + sum_t m[t,j] x[t,k]
//   m = grad_mul F32[T,G,M] and q = grad_sqr F32[T,G] of the group of column k
//   x, grad_x A[T,n,d] as [T,K], fn and grad_fn F32[M,K]
//
// Bytes a token in 16-bit types: 4*K for grad_x, with a target 6*K, and 2*K for grad_fn.
// Algorithm: a lane has two columns. For grad_x it keeps their fn in registers (of 8 or 24 mixes)
// while tokens go by, eight at a time, whose m is in shared memory; all their loads come first. For
// grad_fn a warp takes a chunk of 48 tokens and keeps the sums of 24 mixes in registers; the chunks
// of a block's warps are then added in order. So grad_fn needs no partials and no second kernel,
// but its parallelism is that of columns.
// Class E: each column on its own, sums in the order of the contract. Tokens are independent but
// for grad_fn.
#include <algorithm>

#include "backends/cuda/launch.cuh"
#include "core/float_formats.h"
#include "ops/mhc/norm_fn_bwd/norm_fn_bwd_args.h"
#include "ops/mhc/shared/stream_rows.cuh"

namespace ehc::mhc {

namespace {

constexpr int kWarp = 32;
constexpr int kPair = 2;  // columns of a lane

// --- two columns of a lane ---

struct PairPlace {
  int64_t column;         // of [T,K]
  int64_t stream[kPair];  // and where it is in a token
  int64_t inner[kPair];
  int count;  // of the two exist

  __device__ __forceinline__ PairPlace(const NormFnBackwardArgs& a, int64_t group, int64_t at) {
    const int64_t d = a.sizes.hidden;
    const int64_t width = a.sizes.streams * d / a.groups;
    column = group * width + at;
    count = static_cast<int>(max(int64_t{0}, min(int64_t{kPair}, width - at)));
#pragma unroll
    for (int c = 0; c < kPair; ++c) {
      const int64_t k = c < count ? column + c : 0;
      stream[c] = k / d;
      inner[c] = k - stream[c] * d;
    }
  }
};

// kPairs: both columns exist and lie side by side on a border of two elements, or there is none.
template <bool kPairs, class A>
__device__ __forceinline__ float2 load_two(const A* first, const A* second, int count) {
  Pack pack{};
  if constexpr (kPairs && sizeof(A) == 4) {
    return count > 0 ? *reinterpret_cast<const float2*>(first) : float2{};
  } else if constexpr (kPairs) {
    if (count > 0) pack.word[0] = *reinterpret_cast<const uint32_t*>(first);
    return {column<A>(pack, 0), column<A>(pack, 1)};
  } else {
    Pack other{};
    if (count > 0) pack = cuda::load_pack<false>(first, 1);
    if (count > 1) other = cuda::load_pack<false>(second, 1);
    return {column<A>(pack, 0), column<A>(other, 0)};
  }
}

template <bool kPairs, class A>
__device__ __forceinline__ float2 load_two(const StreamRows& rows, int64_t token,
                                           const PairPlace& at, int64_t of_stream = 1,
                                           int64_t more = 0) {
  const auto element = [&](int c) {
    return row_of<const A>(rows, token, at.stream[c] * of_stream + more) + at.inner[c];
  };
  return load_two<kPairs, A>(element(0), element(1), at.count);
}

// The column of a row for all streams.
template <bool kPairs, class A>
__device__ __forceinline__ float2 load_row(const GradientRows& rows, int64_t token,
                                           const PairPlace& at) {
  const auto load = [&](auto type) {
    using B = decltype(type);
    const B* row = row_of<const B>(rows.rows, token - rows.first_token);
    return load_two<kPairs, B>(row + at.inner[0], row + at.inner[1], at.count);
  };
  return rows.is_f32 ? load(float{}) : load(A{});
}

template <class A>
__device__ __forceinline__ float2 round_pair(float2 x) {
  if constexpr (sizeof(A) == 4) {
    return x;
  } else {
    Pack pack{};
    pack.word[0] = cuda::round_two<A>(x.x, x.y);
    return {column<A>(pack, 0), column<A>(pack, 1)};
  }
}

template <bool kPairs, class A>
__device__ __forceinline__ void store_pair(const GradientRows& rows, int64_t token,
                                           const PairPlace& at, float2 x) {
  const auto element = [&](auto type, int c) {
    using B = decltype(type);
    return row_of<B>(rows.rows, token - rows.first_token, at.stream[c]) + at.inner[c];
  };
  const auto store = [&](auto type) {
    using B = decltype(type);
    if constexpr (kPairs && sizeof(B) == 4) {
      if (at.count > 0) *reinterpret_cast<float2*>(element(type, 0)) = x;
    } else if constexpr (kPairs) {
      if (at.count > 0) {
        *reinterpret_cast<uint32_t*>(element(type, 0)) = cuda::round_two<B>(x.x, x.y);
      }
    } else {
#pragma unroll
      for (int c = 0; c < kPair; ++c) {
        if (c >= at.count) continue;
        const float value = c == 0 ? x.x : x.y;
        cuda::store_pack<false>(element(type, c), cuda::make_pack<B>([&](int) { return value; }),
                                1);
      }
    }
  };
  if (rows.is_f32) {
    store(float{});
  } else {
    store(A{});
  }
}

__device__ __forceinline__ float2 fma_pair(float factor, float2 x, float2 sum) {
  return {fmaf(factor, x.x, sum.x), fmaf(factor, x.y, sum.y)};
}

__device__ __forceinline__ float2 load_fn(const NormFnBackwardArgs& a, int64_t j,
                                          const PairPlace& at) {
  const float* row = a.fn.data + j * a.fn.stride + at.column;
  const auto load = [&](int c) {
    const float fn = c < at.count ? __ldg(row + c) : 0.0f;
    return a.tf32 ? round_to_tf32(fn) : fn;
  };
  return {load(0), load(1)};
}

// --- grad_x ---

constexpr int kStreamThreads = 128;
constexpr int kStreamColumns = kStreamThreads * kPair;
constexpr int kTogether = 8;  // tokens
constexpr int kStage = 64;    // tokens whose m is in shared memory

// What the gradient is added to, of eight tokens.
template <class A, bool kPairs>
__device__ __forceinline__ void load_targets(const NormFnBackwardArgs& a, int64_t first,
                                             int64_t tokens, const PairPlace& at,
                                             float2 (&target)[kTogether]) {
#pragma unroll
  for (int u = 0; u < kTogether; ++u) target[u] = {};
  if (a.grad_residual_acc.data != nullptr) {
    for (int64_t k = 0; k < a.targets; ++k) {
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        if (u >= tokens) continue;
        const float2 more = load_two<kPairs, A>(a.grad_residual_acc, first + u, at, a.targets, k);
        target[u] = k == 0 ? more : float2{target[u].x + more.x, target[u].y + more.y};
      }
    }
  }
  if (a.grad_row.rows.data == nullptr) return;
#pragma unroll
  for (int u = 0; u < kTogether; ++u) {
    if (u >= tokens) continue;
    const float2 row = load_row<kPairs, A>(a.grad_row, first + u, at);
    const float* factor = a.row_factor.data + (first + u) * a.row_factor.token_stride;
    target[u] = {fmaf(__ldg(factor + at.stream[0]), row.x, target[u].x),
                 fmaf(__ldg(factor + at.stream[1]), row.y, target[u].y)};
    if (a.rounds_target) target[u] = round_pair<A>(target[u]);
  }
}

// kMixes: how many there are, so that fn is in registers, or 0.
template <class A, int kMixes, bool kPairs>
__global__ void __launch_bounds__(kStreamThreads, 4)
    grad_streams(const __grid_constant__ NormFnBackwardArgs a, int64_t strips,
                 int64_t tokens_of_block) {
  extern __shared__ float4 shared[];
  float* factors = reinterpret_cast<float*>(shared);  // [kStage/8, M, 8]
  const int mixes = kMixes > 0 ? kMixes : static_cast<int>(a.mixes);
  float* squares = factors + kStage * mixes;
  const int64_t strip = blockIdx.x % strips;
  const int64_t group = blockIdx.x / strips % a.groups;
  const int64_t begin = blockIdx.x / strips / a.groups * tokens_of_block;
  const int64_t end = min(a.sizes.tokens, begin + tokens_of_block);
  const PairPlace at(a, group, strip * kStreamColumns + threadIdx.x * kPair);
  float2 fn[kMixes > 0 ? kMixes : 1];
#pragma unroll
  for (int j = 0; j < kMixes; ++j) fn[j] = load_fn(a, j, at);

  for (int64_t stage = begin; stage < end; stage += kStage) {
    const int tokens = static_cast<int>(min(int64_t{kStage}, end - stage));
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * mixes; i += kStreamThreads) {
      const int t = i / mixes;
      const int j = i - t * mixes;
      factors[(t / kTogether * mixes + j) * kTogether + t % kTogether] =
          __ldg(a.grad_mul.data + (stage + t) * a.grad_mul.token_stride +
                group * a.grad_mul.group_stride + j);
    }
    for (int t = threadIdx.x; t < tokens; t += kStreamThreads) {
      squares[t] = 2.0f * __ldg(a.grad_sqr.data + (stage + t) * a.grad_sqr.token_stride +
                                group * a.grad_sqr.group_stride);
    }
    __syncthreads();
    if (at.count == 0) continue;
    for (int t = 0; t < tokens; t += kTogether) {
      float2 x[kTogether], target[kTogether], sum[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        x[u] = t + u < tokens ? load_two<kPairs, A>(a.residual, stage + t + u, at) : float2{};
        sum[u] = {};
      }
      load_targets<A, kPairs>(a, stage + t, tokens - t, at, target);
      const float4* factor = reinterpret_cast<const float4*>(factors + t * mixes);
#pragma unroll
      for (int j = 0; j < mixes; ++j) {
        const float4 low = factor[2 * j], high = factor[2 * j + 1];
        const float of_token[kTogether] = {low.x,  low.y,  low.z,  low.w,
                                           high.x, high.y, high.z, high.w};
        const float2 value = kMixes > 0 ? fn[j] : load_fn(a, j, at);
#pragma unroll
        for (int u = 0; u < kTogether; ++u) sum[u] = fma_pair(of_token[u], value, sum[u]);
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        if (t + u >= tokens) continue;
        sum[u] = fma_pair(squares[t + u], x[u], sum[u]);
        store_pair<kPairs, A>(a.grad_residual, stage + t + u, at,
                              {target[u].x + sum[u].x, target[u].y + sum[u].y});
      }
    }
  }
}

// --- grad_fn ---

constexpr int kFnWarps = 8;
constexpr int kFnThreads = kFnWarps * kWarp;
constexpr int kFnColumns = kWarp * kPair;

// kMixes of the mixes of 64 columns, over all tokens.
template <class A, int kMixes, bool kPairs>
__global__ void __launch_bounds__(kFnThreads, 2)
    grad_fn(const __grid_constant__ NormFnBackwardArgs a, int64_t strips) {
  constexpr int kSums = kMixes * kFnColumns;
  constexpr int kOfThread = kSums / kFnThreads;
  static_assert(kNormFnTokens * kMixes <= kSums && kNormFnTokens % kTogether == 0);
  __shared__ float4 room[kFnWarps][kSums / 4];  // m of a warp's tokens, later its sums
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t strip = blockIdx.x % strips;
  const int64_t group = blockIdx.x / strips % a.groups;
  const int64_t first_mix = blockIdx.x / strips / a.groups * kMixes;
  const PairPlace at(a, group, strip * kFnColumns + lane * kPair);
  float* of_warp = reinterpret_cast<float*>(room[warp]);
  float total[kOfThread] = {};
  const int64_t chunks = (a.sizes.tokens + kNormFnTokens - 1) / kNormFnTokens;

  for (int64_t round = 0; round < chunks; round += kFnWarps) {
    const int64_t first = (round + warp) * kNormFnTokens;
    const int tokens =
        static_cast<int>(max(int64_t{0}, min(kNormFnTokens, a.sizes.tokens - first)));
    for (int i = lane; i < tokens * kMixes; i += kWarp) {
      const int t = i / kMixes;
      const int64_t j = first_mix + i % kMixes;
      of_warp[i] = j < a.mixes ? __ldg(a.grad_mul.data + (first + t) * a.grad_mul.token_stride +
                                       group * a.grad_mul.group_stride + j)
                               : 0.0f;
    }
    __syncwarp();
    float2 sum[kMixes] = {};
    for (int t = 0; t < tokens; t += kTogether) {
      float2 x[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        x[u] = t + u < tokens ? load_two<kPairs, A>(a.residual, first + t + u, at) : float2{};
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        if (t + u >= tokens) continue;
        const float4* factor = room[warp] + (t + u) * (kMixes / 4);
#pragma unroll
        for (int j = 0; j < kMixes; j += 4) {
          const float4 m = factor[j / 4];
          sum[j] = fma_pair(m.x, x[u], sum[j]);
          sum[j + 1] = fma_pair(m.y, x[u], sum[j + 1]);
          sum[j + 2] = fma_pair(m.z, x[u], sum[j + 2]);
          sum[j + 3] = fma_pair(m.w, x[u], sum[j + 3]);
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kMixes; ++j) {
      reinterpret_cast<float2*>(of_warp + j * kFnColumns)[lane] = sum[j];
    }
    __syncthreads();
    const int made = static_cast<int>(min(int64_t{kFnWarps}, chunks - round));
    for (int w = 0; w < made; ++w) {
      const float* sums = reinterpret_cast<const float*>(room[w]);
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) total[i] += sums[i * kFnThreads + threadIdx.x];
    }
    __syncthreads();
  }
  const int64_t width = a.sizes.streams * a.sizes.hidden / a.groups;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const int e = i * kFnThreads + static_cast<int>(threadIdx.x);
    const int64_t j = first_mix + e / kFnColumns;
    const int64_t inner = strip * kFnColumns + e % kFnColumns;
    if (j >= a.mixes || inner >= width) continue;
    const int64_t k = group * width + inner;
    const float* before = a.grad_fn_acc.data;
    a.grad_fn.data[j * a.grad_fn.stride + k] =
        (before != nullptr ? before[j * a.grad_fn_acc.stride + k] : 0.0f) + total[i];
  }
}

// --- launches ---

constexpr const char* kName = "mhc.norm_fn_bwd";

// Do pairs of columns of all rows lie on borders of two elements?
bool are_pairs(const NormFnBackwardArgs& a) {
  const auto size = static_cast<int64_t>(size_of(a.sizes.activation));
  const auto fits = [&](const StreamRows& r, int64_t of_element) {
    const int64_t border = kPair * of_element;
    return reinterpret_cast<uintptr_t>(r.data) % border == 0 && r.token_stride % kPair == 0 &&
           r.stream_stride % kPair == 0;
  };
  const auto gradients_fit = [&](const GradientRows& r) {
    return fits(r.rows, r.is_f32 ? int64_t{4} : size);
  };
  return a.sizes.hidden % kPair == 0 && a.sizes.streams * a.sizes.hidden / a.groups % kPair == 0 &&
         fits(a.residual, size) && fits(a.grad_residual_acc, size) &&
         gradients_fit(a.grad_residual) && gradients_fit(a.grad_row);
}

template <class Body>
void with_pairs(const NormFnBackwardArgs& a, const Body& body) {
  const bool pairs = are_pairs(a);
  cuda::with_activation(a.sizes.activation, [&](auto activation) {
    pairs ? body(activation, std::true_type{}) : body(activation, std::false_type{});
  });
}

void launch_grad_streams(const NormFnBackwardArgs& a, int device, void* stream) {
  const int64_t width = a.sizes.streams * a.sizes.hidden / a.groups;
  const int64_t strips = (width + kStreamColumns - 1) / kStreamColumns;
  // Long blocks load fn less often, if there are enough of them.
  constexpr int64_t kEnough = 2048;
  int64_t tokens = kStage;
  const auto blocks = [&] { return strips * a.groups * ((a.sizes.tokens + tokens - 1) / tokens); };
  while (tokens < 4 * kStage && blocks() > kEnough) tokens *= 2;
  const size_t shared_bytes = sizeof(float) * kStage * static_cast<size_t>(a.mixes + 1);
  with_pairs(a, [&](auto activation, auto pairs) {
    using A = decltype(activation);
    const auto start = [&](auto kernel) {
      cuda::launch(kName, device, stream, kernel, dim3(cuda::blocks(blocks())),
                   dim3(kStreamThreads), shared_bytes, a, strips, tokens);
    };
    if constexpr (pairs()) {
      if (a.mixes == 24) return start(&grad_streams<A, 24, true>);
      if (a.mixes == 8) return start(&grad_streams<A, 8, true>);
    }
    start(&grad_streams<A, 0, pairs()>);
  });
}

void launch_grad_fn(const NormFnBackwardArgs& a, int device, void* stream) {
  const int64_t width = a.sizes.streams * a.sizes.hidden / a.groups;
  const int64_t strips = (width + kFnColumns - 1) / kFnColumns;
  with_pairs(a, [&](auto activation, auto pairs) {
    using A = decltype(activation);
    const auto start = [&](auto kernel, int64_t mixes) {
      const int64_t tiles = (a.mixes + mixes - 1) / mixes;
      cuda::launch(kName, device, stream, kernel, dim3(cuda::blocks(strips * a.groups * tiles)),
                   dim3(kFnThreads), 0, a, strips);
    };
    if (a.mixes <= 8) return start(&grad_fn<A, 8, pairs()>, 8);
    start(&grad_fn<A, 24, pairs()>, 24);
  });
}

}  // namespace

void norm_fn_bwd_cuda(const NormFnBackwardArgs& a, int device, void* stream) {
  const bool of_streams = a.grad_residual.rows.data != nullptr;
  if (of_streams && a.sizes.tokens > 0) launch_grad_streams(a, device, stream);
  if (a.grad_fn.data != nullptr) launch_grad_fn(a, device, stream);
}

}  // namespace ehc::mhc
