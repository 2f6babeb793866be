// engram.gate_bwd for long calls with four streams of a 16-bit type whose value path has no
// gradient of its own, where rows are aligned and a thread has one pack of each: the same bits as
// the kernel for all calls.
//
// A block walks over the tokens of a chunk, stream by stream, so every row is read once. Weights
// are in shared memory, and so are the packs of go, x and k of the next two streams and of v of the
// next token, on their way; the sums of grad_wf and grad_v are in registers. In a step a block
// writes the gradients of a stream and takes the sum of the next one: one barrier.
#pragma once

#include "backends/cuda/async_copy.cuh"
#include "ops/engram/shared/gate_bwd_rows.cuh"

namespace ehc::engram {

inline constexpr int kWalkStreams = 4;
inline constexpr int kWalkStages = 2;
inline constexpr int kWalkRegisters = 128;
inline constexpr int kMostWalkPacks = 2;  // of a thread, the width of the block apart
inline constexpr int kWalkThreads = 448;  // as many as have so many registers

// What a thread has in shared memory; no other reads it. Distances are those of the largest block,
// so that one register holds all addresses.
template <class A, int kPacks>
struct WalkMemory {
  static constexpr int kRows = 3;  // go, x, k
  static constexpr int kQuads = kWidth<A> / 4;
  static constexpr int kSlots = kWalkStages * kRows + 1 + kWalkStreams * kQuads;
  Pack* first;  // [kWalkStages, kRows], v, [kWalkStreams, kQuads] of weights, kWalkThreads apart

  __device__ __forceinline__ Pack* at(int i, int p) const {
    return first + (i * kPacks + p) * kWalkThreads;
  }
  __device__ __forceinline__ Pack* row(int stage, int r, int p) const {
    return at(stage * kRows + r, p);
  }
  __device__ __forceinline__ Pack* value(int p) const { return at(kWalkStages * kRows, p); }
  __device__ __forceinline__ float4* weight(int h, int quad, int p) const {
    return reinterpret_cast<float4*>(at(kWalkStages * kRows + 1 + h * kQuads + quad, p));
  }
  static constexpr size_t bytes() { return sizeof(Pack) * kSlots * kPacks * kWalkThreads; }
};

// Where the rows of a stream start at the first token of a chunk. In shared memory: otherwise the
// compiler keeps those of all streams in registers.
template <class A>
struct WalkRows {
  const A *grad_out, *residual, *key;
  A *grad_residual, *grad_key;
};

template <class A, int kPacks>
__global__ void __maxnreg__(kWalkRegisters)
    gate_bwd_walk(const __grid_constant__ GateBackwardArgs a, const GradWeightPartials partials,
                  int64_t chunk_tokens, float scale) {
  constexpr int kColumns = kWidth<A>;
  extern __shared__ __align__(128) Pack walk_memory[];
  __shared__ TokenWindow<kWalkStreams> window;
  __shared__ WalkRows<A> rows[kWalkStreams];
  const WalkMemory<A, kPacks> own{walk_memory + threadIdx.x};
  const GateForwardArgs& gate = a.gate;
  const int first = static_cast<int>(threadIdx.x) * kColumns;
  const int step = static_cast<int>(blockDim.x) * kColumns;
  const auto exists = [&](int p) { return first + p * step < static_cast<int>(gate.hidden); };
  const int64_t begin = blockIdx.x * chunk_tokens;
  const int count = static_cast<int>(min(gate.tokens - begin, chunk_tokens));
  if (threadIdx.x < kWalkStreams) {
    const int h = static_cast<int>(threadIdx.x);
    rows[h] = {row_of<const A>(a.grad_out, begin, h), residual_row<A>(gate, begin, h),
               key_row<A>(gate, begin, h), row_of<A>(a.grad_residual, begin, h),
               row_of<A>(a.grad_key, begin, h)};
  }
  __syncthreads();
  const auto fetch = [&](int i, int h, int stage) {
    if (i < count) {
      const int64_t at = i;
      const A* grad = rows[h].grad_out + at * a.grad_out.token_stride + first;
      const A* residual = rows[h].residual + at * gate.residual_token_stride + first;
      const A* key = rows[h].key + at * gate.key_token_stride + first;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (!exists(p)) continue;
        cuda::start_copy(own.row(stage, 0, p), grad + p * step);
        cuda::start_copy(own.row(stage, 1, p), residual + p * step);
        cuda::start_copy(own.row(stage, 2, p), key + p * step);
      }
    }
    cuda::commit_copies();
  };
  const auto fetch_value = [&](int i) {
    if (i < count) {
      const A* value = value_row<A>(gate, begin + i) + first;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (exists(p)) cuda::start_copy(own.value(p), value + p * step);
      }
    }
    cuda::commit_copies();
  };
  // The part of grad_alpha of a stream: a pack is that of a thread of the other kernel.
  const auto put_sum = [&](int stage) {
    const int warps = static_cast<int>(blockDim.x) / cuda::kWarp;
    float sum[kPacks] = {};
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!exists(p)) continue;
      const Pack grad = *own.row(stage, 0, p);
      const Pack value = *own.value(p);
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        sum[p] = fmaf(column<A>(grad, k), column<A>(value, k), sum[p]);
      }
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const float total = warp_sum(sum[p]);
      const int warp = static_cast<int>(threadIdx.x) / cuda::kWarp + p * warps;
      if (threadIdx.x % cuda::kWarp == 0) window.sums[stage].of_warp[0][warp] = total;
    }
  };
  fetch_value(0);
  fetch(0, 0, 0);
  fetch(0, 1, 1);
#pragma unroll
  for (int h = 0; h < kWalkStreams; ++h) {
    const float* weight = gate.weight_fused + h * gate.weight_stream_stride + first;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!exists(p)) continue;
#pragma unroll
      for (int q = 0; q < own.kQuads; ++q) {
        *own.weight(h, q, p) = __ldg(reinterpret_cast<const float4*>(weight + p * step) + q);
      }
    }
  }
  cuda::await_copies<1>();
  put_sum(0);

  float grad_weight[kWalkStreams][kPacks][kColumns] = {};
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int of_window = i % kWindow;
    if (of_window == 0) {
      window.fill(gate, scale, begin + i, begin + min(count, i + kWindow), 0, [](int, int64_t) {});
    }
    float grad_value[kPacks][kColumns] = {};
#pragma unroll
    for (int h = 0; h < kWalkStreams; ++h) {
      const int stage = h % kWalkStages;
      const TokenScalars& scalars = window.scalars[of_window][h];
      const Slopes slopes(scalars, window.sums[stage].total(0, kPacks));
      const float alpha = window.alpha[of_window][h];
      A* grad_residual = rows[h].grad_residual + int64_t{i} * a.grad_residual.token_stride + first;
      A* grad_key = rows[h].grad_key + int64_t{i} * a.grad_key.token_stride + first;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (!exists(p)) continue;
        const auto store = [&](const Pack& of_residual, const Pack& of_key) {
          cuda::store_pack<true>(grad_residual + p * step, of_residual, kColumns);
          cuda::store_pack<true>(grad_key + p * step, of_key, kColumns);
        };
        const Pack grad = *own.row(stage, 0, p);
        if (scalars.is_image) {
          store(grad, Pack{});
          continue;
        }
        float weight[kColumns];
#pragma unroll
        for (int q = 0; q < own.kQuads; ++q) {
          const float4 w = *own.weight(h, q, p);
          weight[4 * q] = w.x, weight[4 * q + 1] = w.y;
          weight[4 * q + 2] = w.z, weight[4 * q + 3] = w.w;
        }
        gate_gradients<A>(slopes, grad, *own.row(stage, 1, p), *own.row(stage, 2, p), weight,
                          grad_weight[h][p], store);
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
          grad_value[p][k] = fmaf(alpha, column<A>(grad, k), grad_value[p][k]);
        }
      }
      if (h + kWalkStages < kWalkStreams) {
        fetch(i, h + kWalkStages, stage);
      } else {
        fetch(i + 1, h + kWalkStages - kWalkStreams, stage);
      }
      cuda::await_copies<1>();
      if (h + 1 < kWalkStreams || i + 1 < count) put_sum((h + 1) % kWalkStages);
      if (h + 2 == kWalkStreams) fetch_value(i + 1);
      __syncthreads();
    }
    A* of_value = row_of<A>(a.grad_value, begin + i) + first;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!exists(p)) continue;
      cuda::store_pack<true>(of_value + p * step,
                             cuda::make_pack<A>([&](int k) { return grad_value[p][k]; }), kColumns);
    }
  }
#pragma unroll
  for (int h = 0; h < kWalkStreams; ++h) {
    float* to = partials.data + blockIdx.x * partials.chunk_stride + h * partials.stream_stride;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (exists(p)) store_sums(to + first + p * step, kColumns, grad_weight[h][p]);
    }
  }
}

template <class A, int kPacks>
bool launch_gate_bwd_walk(const GateBackwardArgs& a, const GradWeightPartials& partials,
                          int64_t chunk_tokens, int64_t chunks, int device, void* stream) {
  constexpr const char* kName = "engram.gate_bwd";
  constexpr size_t kBytes = WalkMemory<A, kPacks>::bytes();
  constexpr size_t kMore = sizeof(TokenWindow<kWalkStreams>) + sizeof(WalkRows<A>[kWalkStreams]);
  if (kBytes + kMore > most_shared(kName, device)) return false;
  const auto kernel = &gate_bwd_walk<A, kPacks>;
  const int threads = row_threads(a.gate.hidden, a.gate.activation, kPacks);
  allow_shared(kName, device, kernel, kBytes);
  cuda::launch(kName, device, stream, kernel, dim3(cuda::blocks(chunks)),
               dim3(static_cast<unsigned>(threads)), kBytes, a, partials, chunk_tokens,
               gate_scale<float>(a.gate.hidden));
  return true;
}

// Whether it took the call.
template <class A>
bool walk_gate_bwd(const GateBackwardArgs& a, const GradWeightPartials& partials,
                   int64_t chunk_tokens, int64_t chunks, int device, void* stream) {
  constexpr int64_t kLeastChunks = 64;  // else a block per stream is better
  const int64_t packs = cuda::packs_of(a.gate.hidden, kWidth<A>);
  if (a.gate.streams != kWalkStreams || chunks < kLeastChunks ||
      packs > kMostWalkPacks * kWalkThreads) {
    return false;
  }
  const auto walk = packs <= kWalkThreads ? &launch_gate_bwd_walk<A, 1>
                                          : &launch_gate_bwd_walk<A, kMostWalkPacks>;
  return walk(a, partials, chunk_tokens, chunks, device, stream);
}

}  // namespace ehc::engram
