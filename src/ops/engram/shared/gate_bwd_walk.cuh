// engram.gate_bwd for long calls with four streams of a 16-bit type whose value path has no
// gradient of its own, where rows are aligned: the same bits as the kernel for all calls.
//
// A block, or two of a cluster that share the columns, walks over the tokens of a chunk, of two
// chunks where it is two. A thread has one pack of a row. Every row is read once: copied to shared
// memory, where the thread that asked for a pack takes it into registers and asks for one further
// on (gate_bwd_walk_rows.cuh says how far), so that the memory has something to bring whatever a
// block waits for. The sums of a token's streams take one barrier together. Where two blocks put
// them together, go of a token comes a token before its x and k, and they have all that time.
// Weights are in shared memory, the sums of grad_wf in registers.
#pragma once

#include "backends/cuda/cluster.cuh"
#include "ops/engram/shared/gate_bwd_walk_rows.cuh"

namespace ehc::engram {

// The sums of a chunk, and zeros for the next.
template <int kColumns>
__device__ __forceinline__ void store_chunk(float* to, float (&sums)[kColumns]) {
#pragma unroll
  for (int k = 0; k < kColumns; k += 4) {
    *reinterpret_cast<float4*>(to + k) = {sums[k], sums[k + 1], sums[k + 2], sums[k + 3]};
    sums[k] = sums[k + 1] = sums[k + 2] = sums[k + 3] = 0;
  }
}

template <class A, class Walk>
__global__ void __launch_bounds__(Walk::kThreads, 1)
    gate_bwd_walk(const __grid_constant__ GateBackwardArgs a, const GradWeightPartials partials,
                  int64_t chunk_tokens, float scale) {
  constexpr int kColumns = kWidth<A>;
  constexpr int kBlocks = Walk::kBlocks;
  constexpr int kStreamsAhead = Walk::kStreamsAhead;
  constexpr bool kGradsFirst = Walk::kGradStage < 0;
  constexpr int kSumsAhead = Walk::kSumsAhead ? 1 : 0;  // tokens
  extern __shared__ __align__(128) Pack walk_memory[];
  __shared__ WalkShared shared;
  const WalkMemory<A, Walk::kThreads> own{walk_memory + threadIdx.x};
  const GateForwardArgs& gate = a.gate;
  const int warp = static_cast<int>(threadIdx.x) / cuda::kWarp;
  const int warps = static_cast<int>(blockDim.x) / cuda::kWarp;
  const int lane = static_cast<int>(threadIdx.x) % cuda::kWarp;
  const unsigned rank = kBlocks == 1 ? 0 : cuda::cluster_rank();
  const int first = static_cast<int>(rank * blockDim.x + threadIdx.x) * kColumns;
  const int64_t offset = first * static_cast<int64_t>(sizeof(A));
  const bool exists = first < static_cast<int>(gate.hidden);
  const int64_t begin = blockIdx.x / kBlocks * kBlocks * chunk_tokens;
  const int count = static_cast<int>(min(gate.tokens - begin, kBlocks * chunk_tokens));

  // The last warp finds rows, the first one makes scalars.
  WalkCursor cursor;
  const bool finds = warp == warps - 1 && lane < kAllRows;
  if (finds) {
    cursor.find<A>(a, lane, begin);
    for (int i = 0; i < kWalkAhead; ++i, cursor.at += cursor.step) {
      shared.rows[i][lane] = cursor.at;
    }
  }
  const auto row_at = [&](int i, int r) {
    return reinterpret_cast<A*>(shared.rows[i % kWalkTables][r] + offset);
  };
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
  const auto fetch = [&](int i, int r) {
    cuda::start_copy_if(exists && i < count, own.slot(r), row_at(i, r));
  };
  const auto fetch_grads = [&](int i) {
    fetch(i, kValueRow);
#pragma unroll
    for (int h = 0; h < kWalkStreams; ++h) fetch(i, kGradRow + h);
  };
  const auto fetch_stream = [&](int i, int h) {
    fetch(i + h / kWalkStreams, kResidualRow + h % kWalkStreams);
    fetch(i + h / kWalkStreams, kKeyRow + h % kWalkStreams);
  };

  Pack grad[kWalkStreams] = {};
  // Sums and grad_v of token i, whose rows are `grad` and `value`.
  const auto put_sums = [&](int i, const Pack& value) {
    float sum[kWalkStreams] = {};
#pragma unroll
    for (int h = 0; h < kWalkStreams; ++h) {
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        sum[h] = fmaf(column<A>(grad[h], k), column<A>(value, k), sum[h]);
      }
    }
    const float total = cuda::four_sums(sum);
    if (lane % 8 == 0) {
      float& to = shared.of_group[i % 2][lane / 8][rank * warps + warp];
      to = total;
      if constexpr (kBlocks == 2) cuda::store_to_block(&to, rank ^ 1, total);
    }
    const float4* scalars = shared.scalars[i / kWalkWindow % 2] + i % kWalkWindow * kWalkStreams;
    float of_value[kColumns] = {};
    if (!shared.is_image[i / kWalkWindow % 2][i % kWalkWindow]) {
#pragma unroll
      for (int h = 0; h < kWalkStreams; ++h) {
        const float alpha = scalars[h].w;
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
          of_value[k] = fmaf(alpha, column<A>(grad[h], k), of_value[k]);
        }
      }
    }
    if (exists) {
      cuda::store_pack<true>(row_at(i, kGradValueRow),
                             cuda::make_pack<A>([&](int k) { return of_value[k]; }), kColumns);
    }
  };
  // Slope of stream lane / 8 of token i, whose sums are there.
  const auto slope_of = [&](int i) {
    float part[kWalkStreams];
#pragma unroll
    for (int h = 0; h < kWalkStreams; ++h) {
      part[h] = lane < warps * kBlocks ? shared.of_group[i % 2][h][lane] : 0.0f;
    }
    const int turn = i / kWalkWindow % 2;
    const int pair = i % kWalkWindow * kWalkStreams + lane / 8;
    const float total = cuda::four_sums(part);
    return shared.is_flat[turn][pair] ? 0.0f : total * shared.scalars[turn][pair].x;
  };
  const auto arrive = [&] {
    if constexpr (kBlocks == 2) cuda::arrive_at_cluster();
  };
  const auto wait = [&] {
    if constexpr (kBlocks == 2) {
      cuda::wait_for_cluster();
    } else {
      __syncthreads();
    }
  };

  fetch_statistics(0);
  cuda::commit_copies();
  __syncthreads();
  Pack value{};
  if (!exists) {
#pragma unroll
    for (int r = 0; r < kReadRows; ++r) *own.slot(r) = Pack{};
  } else if constexpr (kSumsAhead > 0) {
    value = load_passing<true>(row_at(0, kValueRow), kColumns);
#pragma unroll
    for (int h = 0; h < kWalkStreams; ++h) {
      grad[h] = load_passing<true>(row_at(0, kGradRow + h), kColumns);
    }
  }
  fetch_grads(kSumsAhead);
  cuda::commit_copies();
#pragma unroll
  for (int h = kStreamsAhead - kWalkStreams; h < kStreamsAhead; ++h) {
    if (h >= 0) fetch_stream(0, h);
    cuda::commit_copies();
  }
#pragma unroll
  for (int h = 0; h < kWalkStreams; ++h) {
    const float* weight = gate.weight_fused + h * gate.weight_stream_stride + first;
#pragma unroll
    for (int q = 0; q < own.kQuads; ++q) {
      const auto* from = reinterpret_cast<const float4*>(weight) + q;
      *own.weight(h, q) = exists ? __ldg(from) : float4{};
    }
  }
  cuda::await_copies<1 + kWalkStreams>();
  make_scalars(0);
  fetch_statistics(kWalkWindow);
  arrive();
  wait();
  float slopes = 0;
  if constexpr (kSumsAhead > 0) {
    put_sums(0, value);
    arrive();
    wait();
    slopes = slope_of(0);
  }

  float grad_weight[kWalkStreams][kColumns] = {};
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int turn = i / kWalkWindow % 2;
    const bool image = shared.is_image[turn][i % kWalkWindow];
    const float4* scalars = shared.scalars[turn] + i % kWalkWindow * kWalkStreams;
    Pack of_token[kWalkStreams];
#pragma unroll
    for (int h = 0; h < kWalkStreams; ++h) of_token[h] = grad[h];

    cuda::await_copies<kWalkStreams - 1 - Walk::kGradStage>();
    value = *own.slot(kValueRow);
#pragma unroll
    for (int h = 0; h < kWalkStreams; ++h) grad[h] = *own.slot(kGradRow + h);
    if constexpr (kGradsFirst) {
      fetch_grads(i + kSumsAhead + 1);
      cuda::commit_copies();
    }
    if (i + kSumsAhead < count) put_sums(i + kSumsAhead, value);
    if (finds) {
      shared.rows[(i + kWalkAhead) % kWalkTables][lane] = cursor.at;
      cursor.at += cursor.step;
    }
    if (i % kWalkWindow == kWalkWindow - 2) {
      make_scalars(i + 2);
      fetch_statistics(i + 2 + kWalkWindow);
    }
#pragma unroll
    for (int h = 0; h < kWalkStreams; ++h) keep_packed(grad[h]);
    arrive();
    if constexpr (kSumsAhead == 0) {
      wait();
      slopes = slope_of(i);
    }

#pragma unroll
    for (int h = 0; h < kWalkStreams; ++h) {
      if (kGradsFirst && h < kStreamsAhead) {
        cuda::await_copies<kStreamsAhead>();
      } else {
        cuda::await_copies<kStreamsAhead - 1>();
      }
      const Pack x = *own.slot(kResidualRow + h);
      const Pack k = *own.slot(kKeyRow + h);
      fetch_stream(i, h + kStreamsAhead);
      if (h == Walk::kGradStage) fetch_grads(i + kSumsAhead + 1);
      cuda::commit_copies();
      float weight[kColumns];
      take_weights(weight, [&](int q) { return own.weight(h, q); });
      const auto grad_of = [&](int stream) {
        return kSumsAhead > 0 ? of_token[stream] : grad[stream];
      };
      Slopes s;
      s.slope = __shfl_sync(cuda::kAllLanes, slopes, 8 * h);
      s.pull_residual = scalars[h].y;
      s.pull_key = scalars[h].z;
      const auto store = [&](const Pack& of_residual, const Pack& of_key) {
        if (!exists) return;
        A* grad_residual = row_at(i, kGradResidualRow + h);
        A* grad_key = row_at(i, kGradKeyRow + h);
        if constexpr (Walk::kOnce) {
          cuda::store_pack_once<true>(grad_residual, of_residual, kColumns);
          cuda::store_pack_once<true>(grad_key, of_key, kColumns);
        } else {
          cuda::store_pack<true>(grad_residual, of_residual, kColumns);
          cuda::store_pack<true>(grad_key, of_key, kColumns);
        }
      };
      if (image) {
        store(grad_of(h), Pack{});
      } else {
        gate_gradients<A>(s, grad_of(h), x, k, weight, grad_weight[h], store);
      }
    }
    if (exists && (i + 1 == count || (kBlocks > 1 && i + 1 == chunk_tokens))) {
      const int64_t chunk = (begin + i) / chunk_tokens;
#pragma unroll
      for (int h = 0; h < kWalkStreams; ++h) {
        float* to = partials.data + chunk * partials.chunk_stride + h * partials.stream_stride;
        store_chunk(to + first, grad_weight[h]);
      }
    }
    if constexpr (kSumsAhead > 0) {
      wait();
      slopes = slope_of(i + 1);
    }
  }
}

template <class A, class Walk>
bool launch_gate_bwd_walk(const GateBackwardArgs& a, const GradWeightPartials& partials,
                          int64_t chunk_tokens, int64_t chunks, int device, void* stream) {
  constexpr const char* kName = "engram.gate_bwd";
  constexpr int kBlocks = Walk::kBlocks;
  constexpr size_t kBytes = WalkMemory<A, Walk::kThreads>::bytes();
  if (kBytes + sizeof(WalkShared) > most_shared(kName, device)) return false;
  if (kBlocks > 1 && !cuda::has_clusters(device)) return false;
  const auto kernel = &gate_bwd_walk<A, Walk>;
  constexpr int64_t kWarpPacks = int64_t{cuda::kWarp} * kBlocks;
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
  if (a.gate.streams != kWalkStreams || chunks < kLeastChunks ||
      packs > BlockPair::kBlocks * BlockPair::kThreads ||
      !is_vector(partials.data, sizeof(float), partials.chunk_stride, partials.stream_stride)) {
    return false;
  }
  const auto walk = packs <= OneBlock::kThreads ? &launch_gate_bwd_walk<A, OneBlock>
                                                : &launch_gate_bwd_walk<A, BlockPair>;
  return walk(a, partials, chunk_tokens, chunks, device, stream);
}

}  // namespace ehc::engram
