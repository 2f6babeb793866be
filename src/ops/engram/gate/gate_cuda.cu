// engram.gate_fwd on CUDA (sm_80+).
//
//   alpha[t,h] = sigmoid(signed_root(D * rx * rk / sqrt(d))), out[t,h,:] = round(x + alpha * v)
//   x, k, out A[T,n,d]; v A[T,d]; wf F32[n,d]
//
// Bytes: (6n+2)d a token in 16-bit types: x, k, v read once, out written once; n-1 of n reads of v
// and wf come from the caches.
// Algorithm: blocks walk over the tokens of a stream, whose weights they hold in registers. Rows
// are copied to shared memory two tokens ahead, every thread its own packs. In one step a block
// takes the sums of a token, one warp makes alpha of them, and the others already write the token
// before, whose x and v are in registers: one barrier a token. Few tokens, statistics alone, and
// rows that are not aligned or do not fit have a block per token and stream. Class R: the order of
// sums depends on d and the type alone, whatever is saved and wherever the output is. Tokens are
// independent.
#include "backends/cuda/async_copy.cuh"
#include "ops/engram/shared/gate_rows.cuh"

namespace ehc::engram {

namespace {

template <class A, bool kVector>
__device__ __forceinline__ Pack gated(const GateForwardArgs& a, float alpha, const Pack& x,
                                      const Pack& v) {
  if (a.mode == GateMode::add) {
    return cuda::make_pack<A>([&](int k) { return fmaf(alpha, column<A>(v, k), column<A>(x, k)); });
  }
  return cuda::make_pack<A>([&](int k) { return alpha * column<A>(v, k); });
}

template <class A, bool kVector>
__device__ __noinline__ void image_token(const GateForwardArgs& a, int64_t t, int64_t h) {
  if (threadIdx.x == 0) {
    save(a, t, h, GateScalars{});
    if (h == 0 && a.value_mean_square != nullptr) a.value_mean_square[t] = 0;
  }
  if (a.mode == GateMode::stats) return;
  A* out = out_row<A>(a, t, h);
  if (a.mode == GateMode::value) {
    zero_row<kVector>(out, a.hidden);
  } else {
    copy_row<kVector>(residual_row<A>(a, t, h), out, a.hidden);
  }
}

template <class A, bool kVector>
__global__ void __launch_bounds__(kRowThreads)
    gate_fwd(const __grid_constant__ GateForwardArgs a, float scale) {
  cuda::wait_for_previous();
  constexpr int kColumns = kWidth<A>;
  __shared__ WarpSums<GateSums::kCount> sums;
  __shared__ float shared_alpha;
  const auto streams = static_cast<unsigned>(a.streams);
  const int64_t t = blockIdx.x / streams;
  const int64_t h = blockIdx.x % streams;
  if (is_image(a.image_token_mask, t)) return image_token<A, kVector>(a, t, h);

  const A* residual = residual_row<A>(a, t, h);
  const A* key = key_row<A>(a, t, h);
  const A* value = value_row<A>(a, t);
  const float* weight = a.weight_fused + h * a.weight_stream_stride;
  const bool writes = a.mode != GateMode::stats;
  const bool squares = h == 0 && a.value_mean_square != nullptr;
  const int64_t step = blockDim.x * kColumns;
  const int64_t first = threadIdx.x * kColumns;

  GateSums of_thread;
  const auto add = [&](int64_t at, const Pack& x, const Pack& k, const Pack& v) {
    float w[kColumns];
    load_weights<kColumns, kVector>(weight + at, a.hidden - at, w);
    of_thread.add<A>(x, k, w);
    if (squares) of_thread.add_value<A>(v);
  };
  Pack x[kGatePacks] = {}, k[kGatePacks] = {}, v[kGatePacks] = {};
#pragma unroll
  for (int p = 0; p < kGatePacks; ++p) {
    const int64_t at = first + p * step;
    if (at >= a.hidden) continue;
    x[p] = load_passing<kVector>(residual + at, a.hidden - at);
    k[p] = load_passing<kVector>(key + at, a.hidden - at);
    v[p] = load_passing<kVector>(value + at, a.hidden - at);
  }
#pragma unroll
  for (int p = 0; p < kGatePacks; ++p) {
    const int64_t at = first + p * step;
    if (at < a.hidden) add(at, x[p], k[p], v[p]);
  }
  for (int64_t at = first + kGatePacks * step; at < a.hidden; at += step) {
    const int64_t count = a.hidden - at;
    add(at, load_passing<kVector>(residual + at, count), load_passing<kVector>(key + at, count),
        load_passing<kVector>(value + at, count));
  }

  sums.put(of_thread.sum);
  __syncthreads();
  if (threadIdx.x < cuda::kWarp) {
    const GateScalars s = gate_scalars(sums.total(0), sums.total(1), sums.total(2), a, scale);
    const float value_squares = squares ? sums.total(3) : 0.0f;
    if (threadIdx.x == 0) {
      shared_alpha = s.alpha;
      save(a, t, h, s);
      if (squares) a.value_mean_square[t] = value_squares / static_cast<float>(a.hidden);
    }
  }
  if (!writes) return;
  __syncthreads();

  const float alpha = shared_alpha;
#pragma unroll
  for (int p = 0; p < kGatePacks; ++p) keep_packed(x[p]), keep_packed(v[p]);
  A* out = out_row<A>(a, t, h);
#pragma unroll
  for (int p = 0; p < kGatePacks; ++p) {
    const int64_t at = first + p * step;
    if (at >= a.hidden) continue;
    cuda::store_pack<kVector>(out + at, gated<A, kVector>(a, alpha, x[p], v[p]), a.hidden - at);
  }
  for (int64_t at = first + kGatePacks * step; at < a.hidden; at += step) {
    const int64_t count = a.hidden - at;
    const Pack again = load_passing<kVector>(residual + at, count);
    cuda::store_pack<kVector>(
        out + at, gated<A, kVector>(a, alpha, again, load_passing<kVector>(value + at, count)),
        count);
  }
}

constexpr int kStages = 2;
constexpr int kRows = 3;  // x, k and v

// The packs of a block's rows, each read by the thread that asked for it.
struct Stages {
  Pack* memory;  // [kStages, kRows, kGatePacks, threads]

  __device__ __forceinline__ Pack* at(int stage, int row, int p) const {
    return memory + ((stage * kRows + row) * kGatePacks + p) * blockDim.x + threadIdx.x;
  }
};

inline size_t stage_bytes(int threads) {
  return sizeof(Pack) * kStages * kRows * kGatePacks * static_cast<size_t>(threads);
}

// Block b takes tokens b / n, b / n + step, ... of stream b % n.
template <class A, bool kHoldsWeights>
__global__ void __maxnreg__(kHoldsWeights ? 80 : 72)
    gate_walk(const __grid_constant__ GateForwardArgs a, float scale, unsigned token_step) {
  constexpr int kColumns = kWidth<A>;
  extern __shared__ __align__(128) Pack stage_memory[];
  __shared__ WarpSums<GateSums::kCount> sums[2];
  __shared__ float shared_alpha[2];
  const Stages stages{stage_memory};
  const auto streams = static_cast<unsigned>(a.streams);
  const int64_t h = blockIdx.x % streams;
  const int hidden = static_cast<int>(a.hidden);
  const int columns_of_block = static_cast<int>(blockDim.x) * kColumns;
  const int first = static_cast<int>(threadIdx.x) * kColumns;
  const auto fetch = [&](int64_t t, int stage, bool& image) {
    image = t < a.tokens && is_image(a.image_token_mask, t);
    if (t < a.tokens && !image) {
      const A* rows[kRows] = {residual_row<A>(a, t, h), key_row<A>(a, t, h), value_row<A>(a, t)};
#pragma unroll
      for (int p = 0; p < kGatePacks; ++p) {
        const int at = first + p * columns_of_block;
        if (at >= hidden) continue;
#pragma unroll
        for (int r = 0; r < kRows; ++r) cuda::start_copy(stages.at(stage, r, p), rows[r] + at);
      }
    }
    cuda::commit_copies();
  };
  bool image[kStages];
  int64_t t = blockIdx.x / streams;
  fetch(t, 0, image[0]);
  fetch(t + token_step, 1, image[1]);
  const float* weight = a.weight_fused + h * a.weight_stream_stride + first;
  float held[kGatePacks][kColumns] = {};
  if constexpr (kHoldsWeights) {
#pragma unroll
    for (int p = 0; p < kGatePacks; ++p) {
      if (first + p * columns_of_block >= hidden) continue;
      load_weights<kColumns, true>(weight + p * columns_of_block, kColumns, held[p]);
    }
  }

  Pack x[kGatePacks] = {}, v[kGatePacks] = {};  // of the token before
  bool before_is_image = false;
  int turn = 0;
  for (int64_t before = -1;; before = t, t += token_step, turn ^= 1) {
    const bool exists = t < a.tokens;
    const bool has_sums = exists && !image[0];
    cuda::await_copies<kStages - 1>();
    Pack next_x[kGatePacks] = {}, next_v[kGatePacks] = {};
    if (has_sums) {
      GateSums of_thread;
#pragma unroll
      for (int p = 0; p < kGatePacks; ++p) {
        if (first + p * columns_of_block >= hidden) continue;
        next_x[p] = *stages.at(turn, 0, p);
        next_v[p] = *stages.at(turn, 2, p);
        if constexpr (!kHoldsWeights) {
          load_weights<kColumns, true>(weight + p * columns_of_block, kColumns, held[p]);
        }
        of_thread.add<A>(next_x[p], *stages.at(turn, 1, p), held[p]);
      }
      sums[turn].put(of_thread.sum);
    }
    const bool is_image_now = image[0];
    image[0] = image[1];
    fetch(t + kStages * int64_t{token_step}, turn, image[1]);
    __syncthreads();
    if (has_sums && threadIdx.x / cuda::kWarp == turn) {
      const WarpSums<GateSums::kCount>& of_block = sums[turn];
      const GateScalars s =
          gate_scalars(of_block.total(0), of_block.total(1), of_block.total(2), a, scale);
      if (threadIdx.x % cuda::kWarp == 0) {
        shared_alpha[turn] = s.alpha;
        save(a, t, h, s);
      }
    }
    if (before_is_image) {
      image_token<A, true>(a, before, h);
    } else if (before >= 0) {
      const float alpha = shared_alpha[turn ^ 1];
      A* out = out_row<A>(a, before, h);
#pragma unroll
      for (int p = 0; p < kGatePacks; ++p) {
        const int at = first + p * columns_of_block;
        if (at >= hidden) continue;
        cuda::store_pack<true>(out + at, gated<A, true>(a, alpha, x[p], v[p]), kColumns);
      }
    }
    if (!exists) return;
    before_is_image = is_image_now;
#pragma unroll
    for (int p = 0; p < kGatePacks; ++p) x[p] = next_x[p], v[p] = next_v[p];
  }
}

}  // namespace

void gate_fwd_cuda(const GateForwardArgs& a, int device, void* stream) {
  if (a.tokens == 0) return;
  const auto size = static_cast<int64_t>(size_of(a.activation));
  const bool vector =
      are_vectors(a) && (a.mode == GateMode::stats ||
                         is_vector(a.out, size, a.out_token_stride, a.out_stream_stride));
  const int threads = gate_threads(a);
  const auto scale = gate_scale<float>(a.hidden);
  const int64_t held = int64_t{threads} * kGatePacks * (16 / size);
  const int64_t rows = a.tokens * a.streams;
  // Tokens a multiple of 32 KB apart: measured on an H200, blocks that walk lose there what they
  // win elsewhere.
  constexpr int64_t kBadDistance = 32 * 1024;
  const bool may_walk = vector && a.mode != GateMode::stats && threads > 32 && a.hidden <= held &&
                        a.residual_token_stride * size % kBadDistance != 0;
  if (may_walk) {
    bool walks = false;
    cuda::with_activation(a.activation, [&](auto activation) {
      // Two blocks of a processor have registers for weights where they are narrow.
      constexpr int kNarrow = 320;
      const auto kernel = threads <= kNarrow ? &gate_walk<decltype(activation), true>
                                             : &gate_walk<decltype(activation), false>;
      const size_t bytes = stage_bytes(threads);
      const int64_t blocks = resident_blocks("engram.gate_fwd", device, kernel, threads, bytes);
      walks = rows > blocks;
      if (!walks) return;
      const int64_t step = std::max<int64_t>(1, blocks / a.streams);
      cuda::launch("engram.gate_fwd", device, stream, kernel, dim3(cuda::blocks(step * a.streams)),
                   dim3(static_cast<unsigned>(threads)), bytes, a, scale, step);
    });
    if (walks) return;
  }
  with_rows(a.activation, vector, [&](auto activation, auto vectors) {
    cuda::launch_overlapping("engram.gate_fwd", device, stream, &gate_fwd<decltype(activation), vectors()>,
                 dim3(cuda::blocks(a.tokens * a.streams)), dim3(static_cast<unsigned>(threads)), 0,
                 a, scale);
  });
}

}  // namespace ehc::engram
