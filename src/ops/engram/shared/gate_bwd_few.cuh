// engram.gate_bwd for calls of few tokens with four streams of a 16-bit type whose value path has
// no gradient of its own, where rows are aligned and a block has them in one pack a thread
// (sm_90+): the same bits as the kernel for all calls and the sum of its tokens.
//
// A block per token and stream, those of a chunk's tokens in a cluster. Each leaves its part of
// grad_wf in its shared memory; then block r adds the columns of its eighth from all blocks, in
// token order.
#pragma once

#include "backends/cuda/cluster.cuh"
#include "ops/engram/shared/gate_bwd_rows.cuh"

namespace ehc::engram {

inline constexpr int kFewStreams = 4;
inline constexpr int kFewTokens = 8;  // of a chunk

template <class A>
__global__ void __launch_bounds__(kMostThreads)
    gate_bwd_few(const __grid_constant__ GateBackwardArgs a, const GradWeightPartials partials,
                 float scale) {
  cuda::wait_for_previous();
  constexpr int kColumns = kWidth<A>;
  extern __shared__ __align__(16) float few_memory[];  // [hidden]
  __shared__ WarpSums<1> sums;
  const GateForwardArgs& gate = a.gate;
  const int hidden = static_cast<int>(gate.hidden);
  const unsigned rank = cuda::cluster_rank();
  const unsigned part = blockIdx.x / kFewTokens;
  const int64_t chunk = part / kFewStreams;
  const int h = static_cast<int>(part % kFewStreams);
  const int64_t t = chunk * kFewTokens + rank;
  const int at = static_cast<int>(threadIdx.x) * kColumns;
  const bool is_token = t < gate.tokens;
  if (is_token) {
    const bool exists = at < hidden;
    const bool image = is_image(gate.image_token_mask, t);
    // grad_v: a share of the columns, from the rows of all streams.
    const int packs = hidden / kColumns;
    const int share = packs * h / kFewStreams * kColumns + at;
    const bool shares = share < packs * (h + 1) / kFewStreams * kColumns;
    Pack g{}, x{}, k{}, v{}, of_stream[kFewStreams] = {};
    float weight[kColumns] = {}, alpha[kFewStreams] = {};
    if (exists) g = load_passing<true>(row_of<const A>(a.grad_out, t, h) + at, kColumns);
    if (exists && !image) {
      v = load_passing<true>(value_row<A>(gate, t) + at, kColumns);
      x = load_passing<true>(residual_row<A>(gate, t, h) + at, kColumns);
      k = load_passing<true>(key_row<A>(gate, t, h) + at, kColumns);
      load_weights<kColumns, true>(gate.weight_fused + h * gate.weight_stream_stride + at, kColumns,
                                   weight);
    }
    TokenScalars scalars{};
    if (!image) {
#pragma unroll
      for (int s = 0; s < kFewStreams; ++s) {
        if (shares) {
          of_stream[s] = load_passing<true>(row_of<const A>(a.grad_out, t, s) + share, kColumns);
        }
        alpha[s] = __ldg(gate.alpha.data + t * gate.alpha.token_stride + s);
      }
      scalars = scalars_of(gate, scale, t, h);
    }
    if (shares) {
      float sum[kColumns] = {};
#pragma unroll
      for (int s = 0; s < kFewStreams; ++s) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          if (!image) sum[i] = fmaf(alpha[s], column<A>(of_stream[s], i), sum[i]);
        }
      }
      cuda::store_pack<true>(row_of<A>(a.grad_value, t) + share,
                             cuda::make_pack<A>([&](int i) { return sum[i]; }), kColumns);
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum = fmaf(column<A>(g, i), column<A>(v, i), sum);
    sums.put({sum});
    __syncthreads();
    const Slopes slopes(scalars, sums.total(0));
    float grad_weight[kColumns] = {};
    const auto store = [&](const Pack& of_residual, const Pack& of_key) {
      cuda::store_pack<true>(row_of<A>(a.grad_residual, t, h) + at, of_residual, kColumns);
      cuda::store_pack<true>(row_of<A>(a.grad_key, t, h) + at, of_key, kColumns);
    };
    if (exists && image) store(g, Pack{});
    if (exists && !image) gate_gradients<A>(slopes, g, x, k, weight, grad_weight, store);
    if (exists) {
#pragma unroll
      for (int i = 0; i < kColumns; i += 4) {
        *reinterpret_cast<float4*>(few_memory + at + i) = {grad_weight[i], grad_weight[i + 1],
                                                           grad_weight[i + 2], grad_weight[i + 3]};
      }
    }
  }
  cuda::sync_cluster();
  const int tokens = static_cast<int>(min(gate.tokens - chunk * kFewTokens, int64_t{kFewTokens}));
  float* to = partials.data + chunk * partials.chunk_stride + h * partials.stream_stride;
  const int end = hidden * static_cast<int>(rank + 1) / kFewTokens;
  for (int i = hidden * static_cast<int>(rank) / kFewTokens + static_cast<int>(threadIdx.x);
       i < end; i += static_cast<int>(blockDim.x)) {
    float sum = 0;
#pragma unroll
    for (int r = 0; r < kFewTokens; ++r) {
      if (r < tokens) sum += cuda::load_from_block(few_memory + i, r);
    }
    to[i] = sum;
  }
  cuda::sync_cluster();  // nobody reads from a block that is gone
}

// Whether it took the call.
template <class A>
bool gate_bwd_of_few(const GateBackwardArgs& a, const GradWeightPartials& partials,
                     int64_t chunk_tokens, int64_t chunks, int device, void* stream) {
  constexpr const char* kName = "engram.gate_bwd";
  const GateForwardArgs& gate = a.gate;
  if (gate.streams != kFewStreams || chunk_tokens != kFewTokens || !cuda::has_clusters(device)) {
    return false;
  }
  const int threads = gate_bwd_threads<A>(gate);
  const int64_t blocks = chunks * kFewStreams * kFewTokens;
  cuda::launch_clusters(kName, device, stream, &gate_bwd_few<A>, dim3(cuda::blocks(blocks)),
                        kFewTokens, dim3(static_cast<unsigned>(threads)),
                        sizeof(float) * static_cast<size_t>(gate.hidden), blocks * threads <= 32768,
                        a, partials, gate_scale<float>(gate.hidden));
  return true;
}

}  // namespace ehc::engram
