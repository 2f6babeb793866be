// engram.gate_bwd for long calls with four streams of a 16-bit type whose value path has no
// gradient of its own, where rows are aligned: the same bits as the kernel for all calls.
//
// A block walks over the tokens of a chunk and reads every row once: v, go of all streams, then x
// and k stream by stream. A row of its own is copied to a ring of slots in shared memory, whose
// packs the thread that asked for them alone reads: as soon as they are in registers the slot takes
// the row kSlots further on, so the memory always has that many rows to bring, whatever a block
// waits for. The packs of go stay in registers until the sums of all streams are known: one barrier
// a token. Weights are in shared memory too, the sums of grad_wf in registers.
#pragma once

#include "backends/cuda/cluster.cuh"
#include "backends/cuda/pack_ring.cuh"
#include "ops/engram/shared/gate_bwd_rows.cuh"

namespace ehc::engram {

inline constexpr int kWalkStreams = 4;
inline constexpr int kWalkRows = 1 + 3 * kWalkStreams;  // of a token
inline constexpr int kWalkWindow = 8;                   // tokens whose scalars are made together

// Rows of a token in the order of their use.
EHC_HD constexpr int value_at() { return 0; }
EHC_HD constexpr int grad_at(int h) { return 1 + h; }
EHC_HD constexpr int residual_at(int h) { return 1 + kWalkStreams + 2 * h; }
EHC_HD constexpr int key_at(int h) { return residual_at(h) + 1; }

// Shared memory of a block, each thread's part kThreads apart: the ring, and the weights, which no
// other thread reads.
template <class A, int kPacks, int kThreads, int kSlots>
struct WalkMemory {
  static constexpr int kQuads = kWidth<A> / 4;
  using Ring = cuda::PackRing<kWalkRows * kPacks, kSlots, kThreads>;
  Pack* memory;

  __device__ __forceinline__ float4* weight(int h, int p, int quad) const {
    Pack* all = memory + Ring::kPacks + threadIdx.x;
    return reinterpret_cast<float4*>(all + ((h * kPacks + p) * kQuads + quad) * kThreads);
  }
  static constexpr size_t bytes() {
    return sizeof(Pack) * (Ring::kPacks + size_t{kWalkStreams} * kPacks * kQuads * kThreads);
  }
};

// What the threads of a block share.
template <class A>
struct WalkShared {
  static constexpr int kPairs = kWalkWindow * kWalkStreams;  // of a token and a stream
  float4 scalars[2][kPairs];  // of a window and the next: slope_of_alpha, both pulls, alpha
  bool is_flat[2][kPairs], is_image[2][kWalkWindow];
  float statistics[4][kPairs];  // of the window after them: dot, alpha and both reciprocals
  float of_group[2][kWalkStreams][cuda::kWarp];  // sums over 32 packs of a row
  const A* row[kWalkRows];                       // at the first token of the chunk
  A *grad_residual[kWalkStreams], *grad_key[kWalkStreams];
};

// The sums of a chunk, and zeros for the next.
template <int kColumns>
__device__ __forceinline__ void store_chunk(float* to, float (&sums)[kColumns]) {
#pragma unroll
  for (int k = 0; k < kColumns; k += 4) {
    *reinterpret_cast<float4*>(to + k) = {sums[k], sums[k + 1], sums[k + 2], sums[k + 3]};
    sums[k] = sums[k + 1] = sums[k + 2] = sums[k + 3] = 0;
  }
}

template <int kBlocks>
__device__ __forceinline__ void sync_blocks() {
  if constexpr (kBlocks == 1) {
    __syncthreads();
  } else {
    cuda::sync_cluster();
  }
}

template <class A, int kBlocks, int kPacks, int kThreads, int kSlots, bool kOnce>
__global__ void __launch_bounds__(kThreads, 1)
    gate_bwd_walk(const __grid_constant__ GateBackwardArgs a, const GradWeightPartials partials,
                  int64_t chunk_tokens, float scale) {
  constexpr int kColumns = kWidth<A>;
  extern __shared__ __align__(128) Pack walk_memory[];
  __shared__ WalkShared<A> shared;
  const WalkMemory<A, kPacks, kThreads, kSlots> own{walk_memory};
  const GateForwardArgs& gate = a.gate;
  const int warp = static_cast<int>(threadIdx.x) / cuda::kWarp;
  const int warps = static_cast<int>(blockDim.x) / cuda::kWarp;
  const int lane = static_cast<int>(threadIdx.x) % cuda::kWarp;
  const unsigned rank = kBlocks == 1 ? 0 : cuda::cluster_rank();
  const int first = static_cast<int>(rank * blockDim.x + threadIdx.x) * kColumns;
  const int step = static_cast<int>(blockDim.x) * kColumns;
  const auto exists = [&](int p) { return first + p * step < static_cast<int>(gate.hidden); };
  const int64_t begin = blockIdx.x / kBlocks * kBlocks * chunk_tokens;
  const int count = static_cast<int>(min(gate.tokens - begin, kBlocks * chunk_tokens));

  if (threadIdx.x == 0) shared.row[value_at()] = value_row<A>(gate, begin);
  if (threadIdx.x < kWalkStreams) {
    const int h = static_cast<int>(threadIdx.x);
    shared.row[grad_at(h)] = row_of<const A>(a.grad_out, begin, h);
    shared.row[residual_at(h)] = residual_row<A>(gate, begin, h);
    shared.row[key_at(h)] = key_row<A>(gate, begin, h);
    shared.grad_residual[h] = row_of<A>(a.grad_residual, begin, h);
    shared.grad_key[h] = row_of<A>(a.grad_key, begin, h);
  }
  __syncthreads();

  // Statistics of the window from token i on, a thread of the first warp each.
  const auto fetch_statistics = [&](int i) {
    i += lane / kWalkStreams;
    if (warp != 0 || i >= count) return;
    const auto start = [&](int k, const StreamStatistic& from) {
      cuda::start_copy_word(&shared.statistics[k][lane],
                            from.data + (begin + i) * from.token_stride + lane % kWalkStreams);
    };
    start(0, gate.dot), start(1, gate.alpha), start(2, gate.rstd_residual), start(3, gate.rstd_key);
  };
  const auto make_scalars = [&](int i) {
    const int turn = i / kWalkWindow % 2;
    i += lane / kWalkStreams;
    if (warp != 0 || i >= count) return;
    const float alpha = shared.statistics[1][lane];
    const TokenScalars s = scalars_of(gate, scale, shared.statistics[0][lane], alpha,
                                      shared.statistics[2][lane], shared.statistics[3][lane]);
    shared.scalars[turn][lane] = {s.slope_of_alpha, s.pull_residual, s.pull_key, alpha};
    shared.is_flat[turn][lane] = s.is_flat;
    if (lane % kWalkStreams == 0) {
      shared.is_image[turn][lane / kWalkStreams] = is_image(gate.image_token_mask, begin + i);
    }
  };
  constexpr int kHead = kPacks * (1 + kWalkStreams);  // items until x and k
  const auto fetch = [&](int i, int item, Pack* to) {
    const int p = item < kHead ? item / (1 + kWalkStreams) : (item - kHead) / 2 % kPacks;
    const int r = item < kHead ? item % (1 + kWalkStreams)
                               : residual_at((item - kHead) / (2 * kPacks)) + (item - kHead) % 2;
    if (i >= count || !exists(p)) return;
    const int64_t stride = r == value_at()            ? gate.value_token_stride
                           : r < residual_at(0)       ? a.grad_out.token_stride
                           : (r - residual_at(0)) % 2 ? gate.key_token_stride
                                                      : gate.residual_token_stride;
    cuda::start_copy(to, shared.row[r] + i * stride + (first + p * step));
  };

  fetch_statistics(0);
  cuda::commit_copies();
  typename WalkMemory<A, kPacks, kThreads, kSlots>::Ring ring(walk_memory, fetch);
#pragma unroll
  for (int h = 0; h < kWalkStreams; ++h) {
    const float* weight = gate.weight_fused + h * gate.weight_stream_stride + first;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!exists(p)) continue;
#pragma unroll
      for (int q = 0; q < own.kQuads; ++q) {
        *own.weight(h, p, q) = __ldg(reinterpret_cast<const float4*>(weight + p * step) + q);
      }
    }
  }
  cuda::await_copies<kSlots>();
  make_scalars(0);
  fetch_statistics(kWalkWindow);
  sync_blocks<kBlocks>();

  float grad_weight[kWalkStreams][kPacks][kColumns] = {};
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int turn = i / kWalkWindow % 2;
    const int of_window = i % kWalkWindow;
    const bool image = shared.is_image[turn][of_window];
    const float4* scalars = shared.scalars[turn] + of_window * kWalkStreams;

    Pack grad[kWalkStreams][kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Pack value = ring.take(i, p * (1 + kWalkStreams), fetch);
      float sum[kWalkStreams] = {};
#pragma unroll
      for (int h = 0; h < kWalkStreams; ++h) {
        grad[h][p] = ring.take(i, p * (1 + kWalkStreams) + 1 + h, fetch);
        if (!exists(p)) continue;
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
          sum[h] = fmaf(column<A>(grad[h][p], k), column<A>(value, k), sum[h]);
        }
      }
      const float total = cuda::four_sums(sum);
      if (lane % 8 == 0) {
        float& to = shared.of_group[i % 2][lane / 8][rank * warps + warp + p * warps];
        to = total;
        if constexpr (kBlocks == 2) cuda::store_to_block(&to, rank ^ 1, total);
      }
    }
    if (of_window == kWalkWindow - 1) {
      make_scalars(i + 1);
      fetch_statistics(i + 1 + kWalkWindow);
    }
    A* of_value = row_of<A>(a.grad_value, begin + i) + first;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!exists(p)) continue;
      float sum[kColumns] = {};
      if (!image) {
#pragma unroll
        for (int h = 0; h < kWalkStreams; ++h) {
          const float alpha = scalars[h].w;
#pragma unroll
          for (int k = 0; k < kColumns; ++k) {
            sum[k] = fmaf(alpha, column<A>(grad[h][p], k), sum[k]);
          }
        }
      }
      cuda::store_pack<true>(of_value + p * step,
                             cuda::make_pack<A>([&](int k) { return sum[k]; }), kColumns);
    }
#pragma unroll
    for (int h = 0; h < kWalkStreams; ++h) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) keep_packed(grad[h][p]);
    }
    sync_blocks<kBlocks>();
    float slopes = 0;  // of stream lane / 8
    {
      float part[kWalkStreams];
#pragma unroll
      for (int h = 0; h < kWalkStreams; ++h) {
        part[h] = lane < warps * kPacks * kBlocks ? shared.of_group[i % 2][h][lane] : 0.0f;
      }
      const int pair = of_window * kWalkStreams + lane / 8;
      const float total = cuda::four_sums(part);
      slopes = shared.is_flat[turn][pair] ? 0.0f : total * shared.scalars[turn][pair].x;
    }
#pragma unroll
    for (int h = 0; h < kWalkStreams; ++h) {
      Slopes s;
      s.slope = __shfl_sync(cuda::kAllLanes, slopes, 8 * h);
      s.pull_residual = scalars[h].y;
      s.pull_key = scalars[h].z;
      A* grad_residual = shared.grad_residual[h] + i * a.grad_residual.token_stride + first;
      A* grad_key = shared.grad_key[h] + i * a.grad_key.token_stride + first;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int item = kHead + (h * kPacks + p) * 2;
        const Pack x = ring.take(i, item, fetch);
        const Pack k = ring.take(i, item + 1, fetch);
        if (!exists(p)) continue;
        const auto store = [&](const Pack& of_residual, const Pack& of_key) {
          if constexpr (kOnce) {
            cuda::store_pack_once<true>(grad_residual + p * step, of_residual, kColumns);
            cuda::store_pack_once<true>(grad_key + p * step, of_key, kColumns);
          } else {
            cuda::store_pack<true>(grad_residual + p * step, of_residual, kColumns);
            cuda::store_pack<true>(grad_key + p * step, of_key, kColumns);
          }
        };
        if (image) {
          store(grad[h][p], Pack{});
          continue;
        }
        float weight[kColumns];
#pragma unroll
        for (int q = 0; q < own.kQuads; ++q) {
          const float4 w = *own.weight(h, p, q);
          weight[4 * q] = w.x, weight[4 * q + 1] = w.y;
          weight[4 * q + 2] = w.z, weight[4 * q + 3] = w.w;
        }
        gate_gradients<A>(s, grad[h][p], x, k, weight, grad_weight[h][p], store);
      }
    }
    if (i + 1 == count || (kBlocks > 1 && i + 1 == chunk_tokens)) {
      const int64_t chunk = (begin + i) / chunk_tokens;
#pragma unroll
      for (int h = 0; h < kWalkStreams; ++h) {
        float* to = partials.data + chunk * partials.chunk_stride + h * partials.stream_stride;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          if (exists(p)) store_chunk(to + first + p * step, grad_weight[h][p]);
        }
      }
    }
    ring.end_round();
  }
}

template <class A, int kBlocks, int kPacks, int kThreads, int kSlots, bool kOnce>
bool launch_gate_bwd_walk(const GateBackwardArgs& a, const GradWeightPartials& partials,
                          int64_t chunk_tokens, int64_t chunks, int device, void* stream) {
  constexpr const char* kName = "engram.gate_bwd";
  constexpr size_t kBytes = WalkMemory<A, kPacks, kThreads, kSlots>::bytes();
  if (kBytes + sizeof(WalkShared<A>) > most_shared(kName, device)) return false;
  if (kBlocks > 1 && !cuda::has_clusters(device)) return false;
  const auto kernel = &gate_bwd_walk<A, kBlocks, kPacks, kThreads, kSlots, kOnce>;
  constexpr int64_t kWarpPacks = int64_t{cuda::kWarp} * kPacks * kBlocks;
  const int64_t warps = (cuda::packs_of(a.gate.hidden, kWidth<A>) + kWarpPacks - 1) / kWarpPacks;
  const dim3 block(static_cast<unsigned>(warps * cuda::kWarp));
  const auto scale = gate_scale<float>(a.gate.hidden);
  allow_shared(kName, device, kernel, kBytes);
  if constexpr (kBlocks == 1) {
    cuda::launch(kName, device, stream, kernel, dim3(cuda::blocks(chunks)), block, kBytes, a,
                 partials, chunk_tokens, scale);
  } else {
    cuda::launch_clusters(kName, device, stream, kernel,
                          dim3(cuda::blocks((chunks + kBlocks - 1) / kBlocks * kBlocks)), kBlocks,
                          block, kBytes, false, a, partials, chunk_tokens, scale);
  }
  return true;
}

// Whether it took the call.
template <class A>
bool walk_gate_bwd(const GateBackwardArgs& a, const GradWeightPartials& partials,
                   int64_t chunk_tokens, int64_t chunks, int device, void* stream) {
  constexpr int64_t kLeastChunks = 64;  // else a block per stream is better
  const int64_t packs = cuda::packs_of(a.gate.hidden, kWidth<A>);
  if (a.gate.streams != kWalkStreams || chunks < kLeastChunks || packs > 1024) return false;
  const auto walk = packs <= 512   ? &launch_gate_bwd_walk<A, 1, 1, 512, 13, false>
                    : packs <= 640 ? &launch_gate_bwd_walk<A, 1, 1, 640, 13, false>
                                   : &launch_gate_bwd_walk<A, 2, 1, 512, 13, false>;
  return walk(a, partials, chunk_tokens, chunks, device, stream);
}

}  // namespace ehc::engram
