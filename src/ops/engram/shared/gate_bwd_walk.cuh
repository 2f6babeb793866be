// engram.gate_bwd for long calls with four streams of a 16-bit type whose value path has no
// gradient of its own, where rows are aligned: the same bits as the kernel for all calls.
//
// A block, or two of a cluster that share the columns, walks over the tokens of a chunk, of two
// chunks where it is two. A thread has one pack of a row. Every row is read once: copied to shared
// memory, where the thread that asked for a pack takes it into registers and at once asks for that
// of the next token, so that the memory always has about a token to bring, whatever a block waits
// for. Go of a token, and with it the sums of all its streams and grad_v, come a token before its x
// and k: the blocks have the time of a token to put their sums together. Weights are in shared
// memory, the sums of grad_wf in registers.
#pragma once

#include "backends/cuda/async_copy.cuh"
#include "backends/cuda/cluster.cuh"
#include "ops/engram/shared/gate_bwd_rows.cuh"

namespace ehc::engram {

inline constexpr int kWalkStreams = 4;
inline constexpr int kWalkWindow = 8;  // tokens whose scalars are made together
inline constexpr int kWalkAhead = 3;   // tokens until the one whose rows are found
inline constexpr int kWalkTables = 8;  // tokens whose rows are known, half of them in use

// Rows of a token: those that are read have a slot in shared memory.
enum WalkRow : int {
  kValueRow = 0,
  kGradRow = 1,
  kResidualRow = kGradRow + kWalkStreams,
  kKeyRow = kResidualRow + kWalkStreams,
  kReadRows = kKeyRow + kWalkStreams,
  kGradResidualRow = kReadRows,
  kGradKeyRow = kGradResidualRow + kWalkStreams,
  kGradValueRow = kGradKeyRow + kWalkStreams,
  kAllRows,
};

// Packs of shared memory that a block of kThreads has; those of a thread are kThreads apart.
template <class A, int kThreads>
struct WalkMemory {
  static constexpr int kQuads = kWidth<A> / 4;
  Pack* of_thread;

  __device__ __forceinline__ Pack* slot(int row) const { return of_thread + row * kThreads; }
  __device__ __forceinline__ float4* weight(int h, int quad) const {
    return reinterpret_cast<float4*>(slot(kReadRows + h * kQuads + quad));
  }
  static constexpr size_t bytes() {
    return sizeof(Pack) * (kReadRows + kWalkStreams * kQuads) * kThreads;
  }
};

// What the threads of a block share.
struct WalkShared {
  static constexpr int kPairs = kWalkWindow * kWalkStreams;  // of a token and a stream
  float4 scalars[2][kPairs];  // of a window and the next: slope_of_alpha, both pulls, alpha
  bool is_flat[2][kPairs], is_image[2][kWalkWindow];
  float statistics[4][kPairs];  // of the window after them: dot, alpha and both reciprocals
  float of_group[2][kWalkStreams][cuda::kWarp];  // sums over 32 packs of a row
  char* rows[kWalkTables][kAllRows];
};

// A thread's view of the rows of one token after the other.
struct WalkCursor {
  char* at = nullptr;
  int64_t step = 0;  // bytes between tokens

  template <class A>
  __device__ __forceinline__ void point(const A* row, int64_t token_stride) {
    at = const_cast<char*>(reinterpret_cast<const char*>(row));
    step = token_stride * static_cast<int64_t>(sizeof(A));
  }
  template <class A>
  __device__ __forceinline__ void point(const GradientRows& rows, int64_t t, int64_t h) {
    point(row_of<const A>(rows, t, h), rows.token_stride);
  }
  // Row `r` of token t.
  template <class A>
  __device__ __forceinline__ void find(const GateBackwardArgs& a, int r, int64_t t) {
    const int h = (r - kGradRow) % kWalkStreams;
    if (r == kValueRow) {
      point(value_row<A>(a.gate, t), a.gate.value_token_stride);
    } else if (r < kResidualRow) {
      point<A>(a.grad_out, t, h);
    } else if (r < kKeyRow) {
      point(residual_row<A>(a.gate, t, h), a.gate.residual_token_stride);
    } else if (r < kReadRows) {
      point(key_row<A>(a.gate, t, h), a.gate.key_token_stride);
    } else if (r < kGradKeyRow) {
      point<A>(a.grad_residual, t, h);
    } else if (r < kGradValueRow) {
      point<A>(a.grad_key, t, h);
    } else {
      point<A>(a.grad_value, t, 0);
    }
  }
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

template <class A, int kBlocks, int kThreads, bool kOnce, bool kAhead>
__global__ void __launch_bounds__(kThreads, 1)
    gate_bwd_walk(const __grid_constant__ GateBackwardArgs a, const GradWeightPartials partials,
                  int64_t chunk_tokens, float scale) {
  constexpr int kColumns = kWidth<A>;
  constexpr int kGroups = kWalkStreams;  // of copies on their way behind the one that is awaited
  extern __shared__ __align__(128) Pack walk_memory[];
  __shared__ WalkShared shared;
  const WalkMemory<A, kThreads> own{walk_memory + threadIdx.x};
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
    cuda::commit_copies();
  };
  const auto fetch_stream = [&](int i, int h) {
    fetch(i, kResidualRow + h);
    fetch(i, kKeyRow + h);
    cuda::commit_copies();
  };

  Pack grad[kWalkStreams];
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
  } else if constexpr (kAhead) {
    value = load_passing<true>(row_at(0, kValueRow), kColumns);
#pragma unroll
    for (int h = 0; h < kWalkStreams; ++h) {
      grad[h] = load_passing<true>(row_at(0, kGradRow + h), kColumns);
    }
  }
  fetch_grads(kAhead ? 1 : 0);
#pragma unroll
  for (int h = 0; h < kWalkStreams; ++h) fetch_stream(0, h);
#pragma unroll
  for (int h = 0; h < kWalkStreams; ++h) {
    const float* weight = gate.weight_fused + h * gate.weight_stream_stride + first;
#pragma unroll
    for (int q = 0; q < own.kQuads; ++q) {
      const auto* from = reinterpret_cast<const float4*>(weight) + q;
      *own.weight(h, q) = exists ? __ldg(from) : float4{};
    }
  }
  cuda::await_copies<kGroups + 1>();
  make_scalars(0);
  fetch_statistics(kWalkWindow);
  arrive();
  wait();
  float slopes = 0;
  if constexpr (kAhead) {
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

    cuda::await_copies<kGroups>();
    value = *own.slot(kValueRow);
#pragma unroll
    for (int h = 0; h < kWalkStreams; ++h) grad[h] = *own.slot(kGradRow + h);
    constexpr int kNext = kAhead ? 1 : 0;
    fetch_grads(i + kNext + 1);
    if (!kAhead || i + 1 < count) put_sums(i + kNext, value);
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
    if constexpr (!kAhead) {
      wait();
      slopes = slope_of(i);
    }

#pragma unroll
    for (int h = 0; h < kWalkStreams; ++h) {
      cuda::await_copies<kGroups>();
      const Pack x = *own.slot(kResidualRow + h);
      const Pack k = *own.slot(kKeyRow + h);
      fetch_stream(i + 1, h);
      float weight[kColumns];
#pragma unroll
      for (int q = 0; q < own.kQuads; ++q) {
        const float4 w = *own.weight(h, q);
        weight[4 * q] = w.x, weight[4 * q + 1] = w.y;
        weight[4 * q + 2] = w.z, weight[4 * q + 3] = w.w;
      }
      const auto grad_of = [&](int stream) { return kAhead ? of_token[stream] : grad[stream]; };
      Slopes s;
      s.slope = __shfl_sync(cuda::kAllLanes, slopes, 8 * h);
      s.pull_residual = scalars[h].y;
      s.pull_key = scalars[h].z;
      const auto store = [&](const Pack& of_residual, const Pack& of_key) {
        if (!exists) return;
        A* grad_residual = row_at(i, kGradResidualRow + h);
        A* grad_key = row_at(i, kGradKeyRow + h);
        if constexpr (kOnce) {
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
    if constexpr (kAhead) {
      wait();
      slopes = slope_of(i + 1);
    }
  }
}

template <class A, int kBlocks, int kThreads, bool kOnce, bool kAhead>
bool launch_gate_bwd_walk(const GateBackwardArgs& a, const GradWeightPartials& partials,
                          int64_t chunk_tokens, int64_t chunks, int device, void* stream) {
  constexpr const char* kName = "engram.gate_bwd";
  constexpr size_t kBytes = WalkMemory<A, kThreads>::bytes();
  if (kBytes + sizeof(WalkShared) > most_shared(kName, device)) return false;
  if (kBlocks > 1 && !cuda::has_clusters(device)) return false;
  const auto kernel = &gate_bwd_walk<A, kBlocks, kThreads, kOnce, kAhead>;
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
  if (a.gate.streams != kWalkStreams || chunks < kLeastChunks || packs > 1024) return false;
  const auto walk = packs <= 512   ? &launch_gate_bwd_walk<A, 1, 512, true, false>
                    : packs <= 640 ? &launch_gate_bwd_walk<A, 1, 640, false, false>
                                   : &launch_gate_bwd_walk<A, 2, 512, false, true>;
  return walk(a, partials, chunk_tokens, chunks, device, stream);
}

}  // namespace ehc::engram
