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

#include "backends/cuda/async_copy.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/mma.cuh"
#include "core/float_formats.h"
#include "core/forced_grid.h"
#include "ops/mhc/norm_fn_bwd/norm_fn_bwd_args.h"
#include "ops/mhc/shared/lane_pairs.cuh"

namespace ehc::mhc {

namespace {

constexpr int kWarp = 32;

__device__ __forceinline__ PairPlace place_of(const NormFnBackwardArgs& a, int64_t group,
                                              int64_t at) {
  return {a.sizes.hidden, a.sizes.streams * a.sizes.hidden / a.groups, group, at};
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
constexpr int kStage = 64;  // tokens whose m is in shared memory

// What the gradients of kTokens tokens are added to, kRow: as a composite has it, with a row;
// loaded as it lies, for it is wanted late.
template <class A, int kTokens, bool kPairs, bool kRow>
class Targets {
 public:
  __device__ __forceinline__ Targets(const NormFnBackwardArgs& a, const PairPlace& at)
      : a_(a),
        at_(at),
        streams_(a.grad_residual_acc, at, sizeof(A), a.targets),
        row_({a.grad_row.rows.data, a.grad_row.rows.token_stride, 0}, at,
             a.grad_row.is_f32 ? sizeof(float) : sizeof(A)) {}

  __device__ __forceinline__ void load(int64_t first, int tokens) {
    if (a_.grad_residual_acc.data != nullptr) streams_.load(first, tokens, of_streams_);
    if constexpr (kRow) {
      auto row = row_.cursor(first);
      const float* factor = a_.row_factor.data + first * a_.row_factor.token_stride;
#pragma unroll
      for (int u = 0; u < kTokens; ++u, row.step(), factor += a_.row_factor.token_stride) {
        if (u >= tokens) continue;
        if (a_.grad_row.is_f32) {
          of_row_[u] = row.template load<float>();
        } else {
          const TwoColumns<A> two = row.template load<A>();
          of_row_[u] = {two.word[0], two.word[sizeof(A) / 2 - 1]};
        }
        factor_[u][0] = __ldg(factor + at_.stream[0]);
        if constexpr (!kPairs) factor_[u][1] = __ldg(factor + at_.stream[1]);
      }
    }
  }
  // Of token first + u, after load().
  __device__ __forceinline__ float2 value(int64_t first, int u) const {
    float2 sum = {};
    if (a_.grad_residual_acc.data != nullptr) {
      sum = of_streams_[u].value();
      if constexpr (kRow) {
#pragma unroll 1
        for (int64_t k = 1; k < a_.targets; ++k) {
          const LanePairs<kPairs> rows(a_.grad_residual_acc, at_, sizeof(A), a_.targets, k);
          const float2 more = rows.cursor(first + u).template load<A>().value();
          sum = {sum.x + more.x, sum.y + more.y};
        }
      }
    }
    if constexpr (kRow) {
      const float2 row = row_value(of_row_[u]);
      sum = {fmaf(factor_[u][0], row.x, sum.x), fmaf(factor_[u][kPairs ? 0 : 1], row.y, sum.y)};
      if (a_.rounds_target) return TwoColumns<A>::of(sum).value();
    }
    return sum;
  }

 private:
  // The words of a pair of A, or of two floats.
  __device__ __forceinline__ float2 row_value(const TwoColumns<float>& two) const {
    if (a_.grad_row.is_f32) return two.value();
    TwoColumns<A> pair;
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(A)) / 2; ++w) pair.word[w] = two.word[w];
    return pair.value();
  }

  const NormFnBackwardArgs& a_;
  const PairPlace& at_;
  LanePairs<kPairs> streams_, row_;
  TwoColumns<A> of_streams_[kTokens];
  TwoColumns<float> of_row_[kTokens];
  float factor_[kTokens][kPair];
};

// kMixes: how many there are, so that fn is in registers, or 0.
template <class A, int kMixes, int kTokens, bool kPairs, bool kRow>
__global__ void __launch_bounds__(kStreamThreads, 4)
    grad_streams(const __grid_constant__ NormFnBackwardArgs a, int64_t strips,
                 int64_t tokens_of_block) {
  extern __shared__ float4 shared[];
  float* factors = reinterpret_cast<float*>(shared);  // [kStage/kTokens, M, kTokens]
  const int mixes = kMixes > 0 ? kMixes : static_cast<int>(a.mixes);
  float* squares = factors + kStage * mixes;
  const int64_t strip = blockIdx.x % strips;
  const int64_t group = blockIdx.x / strips % a.groups;
  const int64_t begin = blockIdx.x / strips / a.groups * tokens_of_block;
  const int64_t end = min(a.sizes.tokens, begin + tokens_of_block);
  const PairPlace at = place_of(a, group, strip * kStreamColumns + threadIdx.x * kPair);
  const LanePairs<kPairs> rows(a.residual, at, sizeof(A));
  const LanePairs<kPairs> out(a.grad_residual.rows, at,
                              a.grad_residual.is_f32 ? sizeof(float) : sizeof(A));
  Targets<A, kTokens, kPairs, kRow> targets(a, at);
  float2 fn[kMixes > 0 ? kMixes : 1];
#pragma unroll
  for (int j = 0; j < kMixes; ++j) fn[j] = load_fn(a, j, at);

  for (int64_t stage = begin; stage < end; stage += kStage) {
    const int tokens = static_cast<int>(min(int64_t{kStage}, end - stage));
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * mixes; i += kStreamThreads) {
      const int t = i / mixes;
      const int j = i - t * mixes;
      cuda::start_copy_word(&factors[(t / kTokens * mixes + j) * kTokens + t % kTokens],
                            a.grad_mul.data + (stage + t) * a.grad_mul.token_stride +
                                group * a.grad_mul.group_stride + j);
    }
    for (int t = threadIdx.x; t < tokens; t += kStreamThreads) {
      cuda::start_copy_word(&squares[t], a.grad_sqr.data + (stage + t) * a.grad_sqr.token_stride +
                                             group * a.grad_sqr.group_stride);
    }
    cuda::commit_copies();
    cuda::await_copies<0>();
    __syncthreads();
    if (at.count == 0) continue;
    for (int t = 0; t < tokens; t += kTokens) {
      TwoColumns<A> x[kTokens];
      float2 sum[kTokens] = {};
      rows.load(stage + t, tokens - t, x);
      targets.load(stage + t, tokens - t);
      const float4* factor = reinterpret_cast<const float4*>(factors + t * mixes);
#pragma unroll
      for (int j = 0; j < mixes; ++j) {
        float of_token[kTokens];
#pragma unroll
        for (int u = 0; u < kTokens; u += 4) {
          const float4 four = factor[j * (kTokens / 4) + u / 4];
          of_token[u] = four.x, of_token[u + 1] = four.y;
          of_token[u + 2] = four.z, of_token[u + 3] = four.w;
        }
        const float2 value = kMixes > 0 ? fn[j] : load_fn(a, j, at);
#pragma unroll
        for (int u = 0; u < kTokens; ++u) sum[u] = fma_pair(of_token[u], value, sum[u]);
      }
      auto to = out.cursor(stage + t - a.grad_residual.first_token);
#pragma unroll
      for (int u = 0; u < kTokens; ++u, to.step()) {
        if (t + u >= tokens) continue;
        sum[u] = fma_pair(2.0f * squares[t + u], x[u].value(), sum[u]);
        const float2 target = targets.value(stage + t, u);
        const float2 grad = {target.x + sum[u].x, target.y + sum[u].y};
        if (kRow && a.grad_residual.is_f32) {
          to.template store<float>(grad);
        } else {
          to.template store<A>(grad);
        }
      }
    }
  }
}

// --- grad_fn ---

constexpr int kFnWarps = 8;
constexpr int kFnThreads = kFnWarps * kWarp;
constexpr int kFnColumns = kWarp * kPair;
constexpr int kFnTogether = 8;  // tokens whose loads are on their way at once

// kMixes of the mixes of 64 columns, over all tokens.
template <class A, int kMixes, bool kPairs>
__global__ void __launch_bounds__(kFnThreads, 2)
    grad_fn(const __grid_constant__ NormFnBackwardArgs a, int64_t strips) {
  constexpr int kSums = kMixes * kFnColumns;
  constexpr int kOfThread = kSums / kFnThreads;
  static_assert(kNormFnTokens * kMixes <= kSums && kNormFnTokens % kFnTogether == 0);
  __shared__ float4 room[kFnWarps][kSums / 4];  // m of a warp's tokens, later its sums
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t strip = blockIdx.x % strips;
  const int64_t group = blockIdx.x / strips % a.groups;
  const int64_t first_mix = blockIdx.x / strips / a.groups * kMixes;
  const PairPlace at = place_of(a, group, strip * kFnColumns + lane * kPair);
  const LanePairs<kPairs> rows(a.residual, at, sizeof(A));
  float* of_warp = reinterpret_cast<float*>(room[warp]);
  // Does m move 16 bytes at a time?
  const bool has_packs = first_mix + kMixes <= a.mixes && a.grad_mul.token_stride % 4 == 0 &&
                         a.grad_mul.group_stride % 4 == 0 &&
                         reinterpret_cast<uintptr_t>(a.grad_mul.data) % 16 == 0;
  float total[kOfThread] = {};
  const int64_t chunks = (a.sizes.tokens + kNormFnTokens - 1) / kNormFnTokens;

  for (int64_t round = 0; round < chunks; round += kFnWarps) {
    const int64_t first = (round + warp) * kNormFnTokens;
    const int tokens =
        static_cast<int>(max(int64_t{0}, min(kNormFnTokens, a.sizes.tokens - first)));
    const float* m = a.grad_mul.data + first * a.grad_mul.token_stride +
                     group * a.grad_mul.group_stride + first_mix;
    if (has_packs) {
      constexpr int kPacks = kMixes / 4;  // of a token
      for (int i = lane; i < tokens * kPacks; i += kWarp) {
        cuda::start_copy(
            reinterpret_cast<Pack*>(of_warp) + i,
            reinterpret_cast<const Pack*>(m + i / kPacks * a.grad_mul.token_stride) + i % kPacks);
      }
    } else {
      for (int i = lane; i < tokens * kMixes; i += kWarp) {
        const int64_t j = i % kMixes;
        if (first_mix + j < a.mixes) {
          cuda::start_copy_word(&of_warp[i], m + i / kMixes * a.grad_mul.token_stride + j);
        } else {
          of_warp[i] = 0;
        }
      }
    }
    cuda::commit_copies();
    TwoColumns<A> x[kFnTogether], next[kFnTogether];
    rows.load(first, tokens, x);
    cuda::await_copies<0>();
    __syncwarp();
    float2 sum[kMixes] = {};
    const auto add_token = [&](int t, float2 of_token) {
      const float4* factor = room[warp] + t * (kMixes / 4);
#pragma unroll
      for (int j = 0; j < kMixes; j += 4) {
        const float4 m = factor[j / 4];
        sum[j] = fma_pair(m.x, of_token, sum[j]);
        sum[j + 1] = fma_pair(m.y, of_token, sum[j + 1]);
        sum[j + 2] = fma_pair(m.z, of_token, sum[j + 2]);
        sum[j + 3] = fma_pair(m.w, of_token, sum[j + 3]);
      }
    };
    for (int t = 0; t < tokens; t += kFnTogether) {
      rows.load(first + t + kFnTogether, tokens - t - kFnTogether, next);
      if (t + kFnTogether <= tokens) {
#pragma unroll
        for (int u = 0; u < kFnTogether; ++u) add_token(t + u, x[u].value());
      } else {
#pragma unroll
        for (int u = 0; u < kFnTogether; ++u) {
          if (t + u < tokens) add_token(t + u, x[u].value());
        }
      }
#pragma unroll
      for (int u = 0; u < kFnTogether; ++u) x[u] = next[u];
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

bool are_pairs(const NormFnBackwardArgs& a) {
  const size_t size = size_of(a.sizes.activation);
  const auto gradients_are = [&](const GradientRows& r) {
    return are_pairs(r.rows, r.is_f32 ? sizeof(float) : size);
  };
  return a.sizes.hidden % kPair == 0 && a.sizes.streams * a.sizes.hidden / a.groups % kPair == 0 &&
         are_pairs(a.residual, size) && are_pairs(a.grad_residual_acc, size) &&
         gradients_are(a.grad_residual) && gradients_are(a.grad_row);
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
  const int64_t enough = free_blocks(2048);
  int64_t tokens = kStage;
  const auto blocks = [&] { return strips * a.groups * ((a.sizes.tokens + tokens - 1) / tokens); };
  while (tokens < 4 * kStage && blocks() > enough) tokens *= 2;
  const size_t shared_bytes = sizeof(float) * kStage * static_cast<size_t>(a.mixes + 1);
  with_pairs(a, [&](auto activation, auto pairs) {
    using A = decltype(activation);
    const auto start = [&](auto kernel) {
      cuda::launch(kName, device, stream, kernel, dim3(cuda::blocks(blocks())),
                   dim3(kStreamThreads), shared_bytes, a, strips, tokens);
    };
    const auto with_row = [&](auto row) {
      if constexpr (pairs()) {
        constexpr int kTokens = row() ? 4 : 8;
        if (a.mixes == 24) return start(&grad_streams<A, 24, kTokens, true, row()>);
        if (a.mixes == 8) return start(&grad_streams<A, 8, kTokens, true, row()>);
      }
      start(&grad_streams<A, 0, 4, pairs(), row()>);
    };
    a.grad_row.rows.data != nullptr ? with_row(std::true_type{}) : with_row(std::false_type{});
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
