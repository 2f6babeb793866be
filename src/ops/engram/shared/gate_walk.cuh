// engram.gate_fwd for calls of many tokens with four streams, where rows are aligned and a team of
// threads can hold one: the same bits as the kernel for all calls.
//
// A block has as many teams as fit; a team walks over tokens of its own and reads every row once.
// Packs come through a ring in shared memory (pack_ring.cuh), weights stay there for all teams. A
// team takes x and k stream by stream, holds x until the sums of all streams are known and then
// writes the token: one barrier of the team a token.
#pragma once

#include "backends/cuda/pack_ring.cuh"
#include "core/forced_grid.h"
#include "ops/engram/shared/gate_rows.cuh"

namespace ehc::engram {

inline constexpr int kGateStreams = 4;
inline constexpr int kGateItems = (2 * kGateStreams + 1) * kGatePacks;  // packs of a thread a token

template <class A>
__device__ __forceinline__ Pack gated(const GateForwardArgs& a, float alpha, const Pack& x,
                                      const Pack& v) {
  if (a.mode == GateMode::add) {
    return cuda::make_pack<A>([&](int k) { return fmaf(alpha, column<A>(v, k), column<A>(x, k)); });
  }
  return cuda::make_pack<A>([&](int k) { return alpha * column<A>(v, k); });
}

// Rows of a thread's columns, token after token.
template <class A>
struct GateCursor {
  A* at;
  int64_t stream_stride, token_step;

  __device__ __forceinline__ A* row(int h, int ahead = 0) const {
    return at + h * stream_stride + ahead * token_step;
  }
  __device__ __forceinline__ void advance() { at += token_step; }
};

template <class A, int kThreads, int kSlots>
__global__ void __launch_bounds__(kThreads, 1)
    gate_walk(const __grid_constant__ GateForwardArgs a, float scale, int team_threads) {
  constexpr int kColumns = kWidth<A>;
  constexpr int kQuads = kColumns / 4;
  constexpr int kSums = GateSums::kCount - 1;
  using Ring = cuda::PackRing<kGateItems, kSlots, kThreads>;
  extern __shared__ __align__(128) Pack gate_memory[];
  __shared__ float of_warp[2][kSums][kGateStreams][kThreads / cuda::kWarp];
  const int thread = static_cast<int>(threadIdx.x) % team_threads;
  const int team = static_cast<int>(threadIdx.x) / team_threads;
  const int teams = static_cast<int>(blockDim.x) / team_threads;
  const int lane = thread % cuda::kWarp;
  const int warp = static_cast<int>(threadIdx.x) / cuda::kWarp;
  const int warps = team_threads / cuda::kWarp;
  const int first = thread * kColumns;
  const int columns_of_team = team_threads * kColumns;
  bool exists[kGatePacks];
#pragma unroll
  for (int p = 0; p < kGatePacks; ++p) exists[p] = first + p * columns_of_team < a.hidden;
  int64_t t = int64_t{blockIdx.x} + int64_t{gridDim.x} * team;
  const int64_t step = int64_t{gridDim.x} * teams;
  // Those that are read are a token ahead.
  GateCursor<const A> residual{residual_row<A>(a, t + step, 0) + first, a.residual_stream_stride,
                               step * a.residual_token_stride};
  GateCursor<const A> key{key_row<A>(a, t + step, 0) + first, a.key_stream_stride,
                          step * a.key_token_stride};
  GateCursor<const A> value{value_row<A>(a, t + step) + first, 0, step * a.value_token_stride};
  GateCursor<A> out{out_row<A>(a, t, 0) + first, a.out_stream_stride, step * a.out_token_stride};

  const auto fetch = [&](int ahead, int item, Pack* to) {
    const int p = item % kGatePacks;
    const int row = item / kGatePacks;
    const A* from = row == 2 * kGateStreams ? value.row(0, ahead - 1)
                    : row % 2 == 0          ? residual.row(row / 2, ahead - 1)
                                            : key.row(row / 2, ahead - 1);
    cuda::start_copy_if(exists[p] && t + ahead * step < a.tokens, to, from + p * columns_of_team);
  };
  Ring ring(gate_memory, fetch);
  // [kGateStreams, kGatePacks, kQuads, team_threads]
  const auto weight_at = [&](int h, int p, int quad) {
    return reinterpret_cast<float4*>(gate_memory + Ring::kPacks) +
           ((h * kGatePacks + p) * kQuads + quad) * team_threads + thread;
  };
#pragma unroll
  for (int h = 0; h < kGateStreams; ++h) {
    if (h % teams != team) continue;
#pragma unroll
    for (int p = 0; p < kGatePacks; ++p) {
      const float* from = a.weight_fused + h * a.weight_stream_stride + first + p * columns_of_team;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const auto* quad = reinterpret_cast<const float4*>(from) + q;
        *weight_at(h, p, q) = exists[p] ? __ldg(quad) : float4{};
      }
    }
  }
  __syncthreads();

  bool image = t < a.tokens && is_image(a.image_token_mask, t);
  int turn = 0;
#pragma unroll 1
  for (; t < a.tokens; t += step, turn ^= 1) {
    const bool next_image = t + step < a.tokens && is_image(a.image_token_mask, t + step);
    Pack x[kGateStreams][kGatePacks];
    float sum[kSums][kGateStreams];
#pragma unroll
    for (int h = 0; h < kGateStreams; ++h) {
      GateSums of_thread;
#pragma unroll
      for (int p = 0; p < kGatePacks; ++p) {
        x[h][p] = ring.take(2 * h * kGatePacks + p, fetch);
      }
#pragma unroll
      for (int p = 0; p < kGatePacks; ++p) {
        const Pack k = ring.take((2 * h + 1) * kGatePacks + p, fetch);
        float weight[kColumns];
        take_weights(weight, [&](int q) { return weight_at(h, p, q); });
        if (exists[p]) of_thread.add<A>(x[h][p], k, weight);
      }
#pragma unroll
      for (int s = 0; s < kSums; ++s) sum[s][h] = of_thread.sum[s];
    }
#pragma unroll
    for (int h = 0; h < kGateStreams; ++h) {
#pragma unroll
      for (int p = 0; p < kGatePacks; ++p) keep_packed(x[h][p]);
    }
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      const float total = cuda::four_sums(sum[s]);
      if (lane % 8 == 0) of_warp[turn][s][lane / 8][warp] = total;
    }
    cuda::sync_team(team, team_threads);
    float total[kSums];  // of stream lane / 8
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      float part[kGateStreams];
#pragma unroll
      for (int h = 0; h < kGateStreams; ++h) {
        part[h] = lane < warps ? of_warp[turn][s][h][team * warps + lane] : 0.0f;
      }
      total[s] = cuda::four_sums(part);
    }
    const GateScalars scalars = gate_scalars(total[0], total[1], total[2], a, scale);
    if (thread < cuda::kWarp && lane % 8 == 0) {
      save(a, t, lane / 8, image ? GateScalars{} : scalars);
    }
    Pack v[kGatePacks];
#pragma unroll
    for (int p = 0; p < kGatePacks; ++p) {
      v[p] = ring.take(2 * kGateStreams * kGatePacks + p, fetch);
    }
#pragma unroll
    for (int h = 0; h < kGateStreams; ++h) {
      const float alpha = __shfl_sync(cuda::kAllLanes, scalars.alpha, 8 * h);
#pragma unroll
      for (int p = 0; p < kGatePacks; ++p) {
        Pack y = gated<A>(a, alpha, x[h][p], v[p]);
        if (image) y = a.mode == GateMode::add ? x[h][p] : Pack{};
        if (exists[p]) cuda::store_pack<true>(out.row(h) + p * columns_of_team, y, kColumns);
      }
    }
    ring.end_round();
    residual.advance(), key.advance(), value.advance(), out.advance();
    image = next_image;
  }
}

template <class A, int kThreads, int kSlots>
bool launch_gate_walk(const GateForwardArgs& a, int device, void* stream) {
  constexpr const char* kName = "engram.gate_fwd";
  constexpr int kMostTeams = 8;
  const auto kernel = &gate_walk<A, kThreads, kSlots>;
  const int team_threads = gate_threads(a);
  const size_t bytes =
      sizeof(Pack) * (cuda::PackRing<kGateItems, kSlots, kThreads>::kPacks +
                      size_t{kGateStreams} * kGatePacks * (kWidth<A> / 4) * team_threads);
  if (bytes + 2048 > most_shared(kName, device)) return false;
  const int64_t blocks = resident_blocks(kName, device, kernel, kThreads, bytes);
  const int teams = std::min(kMostTeams, kThreads / team_threads);
  const int64_t rounds = (a.tokens + blocks * teams - 1) / (blocks * teams);
  const int64_t even = (a.tokens + rounds * teams - 1) / (rounds * teams);
  cuda::launch(kName, device, stream, kernel, dim3(cuda::blocks(free_blocks(even))),
               dim3(static_cast<unsigned>(teams * team_threads)), bytes, a,
               gate_scale<float>(a.hidden), team_threads);
  return true;
}

// Whether it took the call, whose rows are aligned.
template <class A>
bool walk_gate(const GateForwardArgs& a, int device, void* stream) {
  constexpr int64_t kLeastTokens = 512;  // else a block per stream is better
  const int threads = gate_threads(a);
  const int64_t packs = cuda::packs_of(a.hidden, kWidth<A>);
  if (a.streams != kGateStreams || a.mode == GateMode::stats || a.value_mean_square != nullptr ||
      a.tokens < kLeastTokens || packs > int64_t{threads} * kGatePacks) {
    return false;
  }
  // Most threads of a block and slots of each: so that 40 to 60 KB are on their way to a processor.
  // With fewer bytes it waits; with more, processors near the memory overtake the others.
  const auto walk = threads <= 160   ? &launch_gate_walk<A, 320, 9>
                    : threads <= 256 ? &launch_gate_walk<A, 256, 14>
                    : threads <= 320 ? &launch_gate_walk<A, 320, 9>
                    : threads <= 448 ? &launch_gate_walk<A, 448, 7>
                                     : &launch_gate_walk<A, 512, 6>;
  return walk(a, device, stream);
}

}  // namespace ehc::engram
