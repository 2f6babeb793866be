// engram.gate_bwd where the value path has no gradient of its own and rows of a 16-bit type are
// aligned and have a thread for every pack: the same bits, with the next rows on their way.
#pragma once

#include "backends/cuda/async_copy.cuh"
#include "ops/engram/shared/gate_bwd_rows.cuh"

namespace ehc::engram {

inline constexpr int kWalkStages = 3;

// A thread's packs of go, v, x and k, on their way for the next tokens; no other reads them.
struct WalkRows {
  static constexpr int kRows = 4;
  Pack* memory;  // [kWalkStages, kRows, threads]

  __device__ __forceinline__ Pack* at(int stage, int row) const {
    return memory + (stage * kRows + row) * blockDim.x + threadIdx.x;
  }
};

inline size_t walk_bytes(int threads) {
  return sizeof(Pack) * kWalkStages * WalkRows::kRows * static_cast<size_t>(threads);
}

// Columns of grad_v that a thread makes at a time, from kTogether streams at once.
template <class A>
struct ValueGradient {
  static constexpr int kColumns = 4;
  static constexpr int kTogether = 4;
};

// `grad`: from the token's row of the first stream.
template <class A>
__device__ __forceinline__ void write_value(const A* grad, int64_t stream_stride,
                                            const float* alpha, int n, A* to) {
  constexpr int kColumns = ValueGradient<A>::kColumns;
  constexpr int kTogether = ValueGradient<A>::kTogether;
  float sum[kColumns] = {};
#pragma unroll 1
  for (int first = 0; first < n; first += kTogether) {
    uint2 loaded[kTogether] = {};
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (first + i >= n) continue;
      loaded[i] = *reinterpret_cast<const uint2*>(grad + (first + i) * stream_stride);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (first + i >= n) continue;
      const Pack pack{{loaded[i].x, loaded[i].y}};
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        sum[k] = fmaf(alpha[first + i], column<A>(pack, k), sum[k]);
      }
    }
  }
  *reinterpret_cast<uint2*>(to) = {cuda::round_two<A>(sum[0], sum[1]),
                                   cuda::round_two<A>(sum[2], sum[3])};
}

template <class A>
__global__ void __launch_bounds__(kMostThreads)
    gate_bwd_walk(const __grid_constant__ GateBackwardArgs a, const GradWeightPartials partials,
                  int64_t chunk_tokens, float scale) {
  constexpr int kColumns = kWidth<A>;
  constexpr int kValueColumns = ValueGradient<A>::kColumns;
  extern __shared__ Pack walk_memory[];
  __shared__ TokenWindow window;
  const WalkRows staged{walk_memory};
  const GateForwardArgs& gate = a.gate;
  const int hidden = static_cast<int>(gate.hidden);
  const int n = static_cast<int>(gate.streams);
  const int h = static_cast<int>(blockIdx.x % static_cast<unsigned>(n));
  const int64_t chunk = blockIdx.x / static_cast<unsigned>(n);
  const int first = static_cast<int>(threadIdx.x) * kColumns;
  const bool works = first < hidden;  // of the last warp some may have no columns
  const int64_t begin = chunk * chunk_tokens;
  const int64_t end = min(gate.tokens, begin + chunk_tokens);
  const auto fetch = [&](int64_t t, int stage) {
    if (t < end && works) {
      cuda::start_copy(staged.at(stage, 0), row_of<const A>(a.grad_out, t, h) + first);
      cuda::start_copy(staged.at(stage, 1), value_row<A>(gate, t) + first);
      cuda::start_copy(staged.at(stage, 2), residual_row<A>(gate, t, h) + first);
      cuda::start_copy(staged.at(stage, 3), key_row<A>(gate, t, h) + first);
    }
    cuda::commit_copies();
  };
#pragma unroll
  for (int stage = 0; stage < kWalkStages; ++stage) fetch(begin + stage, stage);

  float weight[kColumns] = {};
  float grad_weight[kColumns] = {};
  if (works) {
    load_weights<kColumns, true>(gate.weight_fused + h * gate.weight_stream_stride + first,
                                 kColumns, weight);
  }
  const int parts = hidden / kValueColumns;
  const int value_end = (parts * (h + 1) / n) * kValueColumns;
  const int value_first = (parts * h / n + static_cast<int>(threadIdx.x)) * kValueColumns;

  int64_t window_begin = begin;
  int64_t window_end = begin;
  int turn = 0;
  int stage = 0;
#pragma unroll 1
  for (int64_t t = begin; t < end; ++t) {
    if (t == window_end) {
      window_begin = t;
      window_end = min(end, t + kWindow);
      window.fill(gate, scale, t, window_end, h, [](int, int64_t) {});
    }
    cuda::await_copies<kWalkStages - 1>();
    float sum = 0;
    if (works) {
      const Pack grad = *staged.at(stage, 0);
      const Pack value = *staged.at(stage, 1);
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        sum = fmaf(column<A>(grad, k), column<A>(value, k), sum);
      }
    }
    window.sums[turn].put({sum});
    __syncthreads();
    const int of_window = static_cast<int>(t - window_begin);
    const TokenScalars& scalars = window.scalars[of_window];
    const Slopes slopes(scalars, window.sums[turn].total(0));
    const bool image = scalars.is_image;
    if (works) {
      const auto store = [&](const Pack& of_residual, const Pack& of_key) {
        cuda::store_pack<true>(row_of<A>(a.grad_residual, t, h) + first, of_residual, kColumns);
        cuda::store_pack<true>(row_of<A>(a.grad_key, t, h) + first, of_key, kColumns);
      };
      const Pack grad = *staged.at(stage, 0);
      if (image) {
        store(grad, Pack{});
      } else {
        gate_gradients<A>(slopes, grad, *staged.at(stage, 2), *staged.at(stage, 3), weight,
                          grad_weight, store);
      }
    }
    fetch(t + kWalkStages, stage);
    stage = stage + 1 == kWalkStages ? 0 : stage + 1;
    turn ^= 1;
#pragma unroll 1
    for (int at = value_first; at < value_end; at += static_cast<int>(blockDim.x) * kValueColumns) {
      A* to = row_of<A>(a.grad_value, t) + at;
      if (image) {
        *reinterpret_cast<uint2*>(to) = {};
      } else {
        write_value<A>(row_of<const A>(a.grad_out, t) + at, a.grad_out.stream_stride,
                       window.alpha[of_window], n, to);
      }
    }
  }
  if (!works) return;
  store_sums(partials.data + chunk * partials.chunk_stride + h * partials.stream_stride + first,
             kColumns, grad_weight);
}

// At most two blocks a processor: their waves fit the 128 chunks of long calls better than three
// would.
template <class A>
void launch_gate_bwd_walk(const GateBackwardArgs& a, const GradWeightPartials& partials,
                          int64_t chunk_tokens, int64_t chunks, int device, void* stream) {
  constexpr size_t kLeast = 80 * 1024;
  constexpr const char* kName = "engram.gate_bwd";
  const int threads = gate_bwd_threads<A>(a.gate);
  const auto kernel = &gate_bwd_walk<A>;
  const size_t bytes = std::max(kLeast, walk_bytes(threads));
  allow_shared(kName, device, kernel, bytes);
  cuda::launch(kName, device, stream, kernel, dim3(cuda::blocks(chunks * a.gate.streams)),
               dim3(static_cast<unsigned>(threads)), bytes, a, partials, chunk_tokens,
               gate_scale<float>(a.gate.hidden));
}

}  // namespace ehc::engram
