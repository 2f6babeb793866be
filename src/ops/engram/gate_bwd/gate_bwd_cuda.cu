// engram.gate_bwd on CUDA (sm_80+).
//
//   grad_x = round(go + slope * (k * wf - x * D rx^2/d))
//   grad_k = round(slope * (x * wf - k * D rk^2/d))
//   grad_v = round(sum_h alpha * gp), grad_wf = sum_t slope * x * k
//   go, gp, x, k, grad_x, grad_k A[T,n,d]; v, grad_v A[T,d]; wf, grad_wf F32[n,d]
//
// Bytes: (10n+4)d a token in 16-bit types, 16n of statistics, 4*P*n*d of partial sums; the second
// read of gp and n-1 of n reads of v come from the caches.
// Algorithm: many tokens of four streams are walked over by blocks that read every row once
// (gate_bwd_walk.cuh), few tokens have clusters (gate_bwd_few.cuh), both where rows are aligned and
// the value path has no gradient of its own. Here is what takes every call: a block per chunk of
// tokens and stream walks over the tokens. A thread reads its packs of a token at once and holds
// them until the sum for grad_alpha is known, and the sums of grad_wf over the chunk all the time.
// What the statistics alone decide is made for a window of tokens, a thread each. Of grad_v a block
// makes the columns of its share, from the rows of all streams. Rows wider than the registers of a
// block are cut into segments, whose blocks all take the sum over the whole row. Class R: the order
// of sums over d depends on d and the type alone, grad_wf is summed in token order over chunks that
// T alone decides. Tokens are independent.
#include "core/token_chunks.h"
#include "ops/engram/shared/gate_bwd_few.cuh"
#include "ops/engram/shared/gate_bwd_walk.cuh"

namespace ehc::engram {

namespace {

constexpr int kTogether = 4;  // streams whose gp is on its way for grad_v

// Where the rows of a token and stream start.
template <class A, class Path>
struct TokenRows {
  const A *grad_out, *residual, *key, *value;
  const Path* value_path;
  A *grad_residual, *grad_key, *grad_value;
};

template <class A, class Path>
__device__ __forceinline__ TokenRows<A, Path> rows_of(const GateBackwardArgs& a, int64_t t,
                                                      int64_t h) {
  return {row_of<const A>(a.grad_out, t, h),
          residual_row<A>(a.gate, t, h),
          key_row<A>(a.gate, t, h),
          value_row<A>(a.gate, t),
          row_of<const Path>(a.grad_value_path, t, h),
          row_of<A>(a.grad_residual, t, h),
          row_of<A>(a.grad_key, t, h),
          row_of<A>(a.grad_value, t)};
}

// A block's part of a row: the packs of thread j are j, j + threads, ... from that of `begin` on.
struct Segment {
  int begin, end;              // columns of the row, end may lie beyond it
  int value_begin, value_end;  // columns of grad_v
};

// A pack's columns of a row of gp, which is of A or of float.
template <class A, class Path>
struct PathPack {
  float x[kWidth<A>];

  template <bool kVector>
  __device__ __forceinline__ void load(const Path* from, int64_t count) {
    load_weights<kWidth<A>, kVector>(from, count, x);
  }
  __device__ __forceinline__ float operator[](int k) const { return x[k]; }
};
template <class A>
struct PathPack<A, A> {
  Pack pack{};

  template <bool kVector>
  __device__ __forceinline__ void load(const A* from, int64_t count) {
    pack = cuda::load_pack<kVector>(from, count);
  }
  __device__ __forceinline__ float operator[](int k) const { return column<A>(pack, k); }
};

template <class A, class Path>
__device__ __forceinline__ float grad_alpha_of(const PathPack<A, Path>& grad, const Pack& value,
                                               float sum) {
#pragma unroll
  for (int k = 0; k < kWidth<A>; ++k) sum = fmaf(grad[k], column<A>(value, k), sum);
  return sum;
}

// The part of grad_alpha of columns [begin, end) that a block does not hold.
template <class A, bool kVector, class Path>
__device__ __forceinline__ float grad_alpha_elsewhere(const Path* grad, const A* value, int begin,
                                                      int end, int hidden, float sum) {
#pragma unroll 1
  for (int at = begin + static_cast<int>(threadIdx.x) * kWidth<A>; at < min(end, hidden);
       at += static_cast<int>(blockDim.x) * kWidth<A>) {
    PathPack<A, Path> pack;
    pack.template load<kVector>(grad + at, hidden - at);
    sum = grad_alpha_of<A>(pack, cuda::load_pack<kVector>(value + at, hidden - at), sum);
  }
  return sum;
}

// `value_path`: the token's row of the first stream.
template <class A, bool kVector, class Path>
__device__ __forceinline__ void write_grad_value(const GateBackwardArgs& a, const Path* value_path,
                                                 A* to, const Segment& part, const float* alpha) {
  const int hidden = static_cast<int>(a.gate.hidden);
  const int n = static_cast<int>(a.gate.streams);
#pragma unroll 1
  for (int at = part.value_begin + static_cast<int>(threadIdx.x) * kWidth<A>; at < part.value_end;
       at += static_cast<int>(blockDim.x) * kWidth<A>) {
    float sum[kWidth<A>] = {};
#pragma unroll 1
    for (int first = 0; first < n; first += kTogether) {
      PathPack<A, Path> grad[kTogether] = {};
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i >= n) continue;
        const Path* row = value_path + (first + i) * a.grad_value_path.stream_stride;
        grad[i].template load<kVector>(row + at, hidden - at);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i >= n) continue;
#pragma unroll
        for (int k = 0; k < kWidth<A>; ++k) {
          sum[k] = fmaf(alpha[first + i], grad[i][k], sum[k]);
        }
      }
    }
    cuda::store_pack<kVector>(to + at, cuda::make_pack<A>([&](int k) { return sum[k]; }),
                              hidden - at);
  }
}

template <class A, bool kVector, class Path>
__device__ __forceinline__ void write_image_token(const TokenRows<A, Path>& rows,
                                                  const Segment& part, int hidden) {
  const int step = static_cast<int>(blockDim.x) * kWidth<A>;
  const int first = static_cast<int>(threadIdx.x) * kWidth<A>;
#pragma unroll 1
  for (int at = part.begin + first; at < min(part.end, hidden); at += step) {
    cuda::store_pack<kVector>(rows.grad_residual + at,
                              cuda::load_pack<kVector>(rows.grad_out + at, hidden - at),
                              hidden - at);
    cuda::store_pack<kVector>(rows.grad_key + at, Pack{}, hidden - at);
  }
#pragma unroll 1
  for (int at = part.value_begin + first; at < part.value_end; at += step) {
    cuda::store_pack<kVector>(rows.grad_value + at, Pack{}, hidden - at);
  }
}

// kSeparate: gp, of Path, is not go.
template <class A, bool kVector, class Path, bool kSeparate>
__global__ void __launch_bounds__(kMostThreads)
    gate_bwd(const __grid_constant__ GateBackwardArgs a, const GradWeightPartials partials,
             int64_t chunk_tokens, float scale, unsigned segments) {
  cuda::wait_for_previous();
  constexpr int kColumns = kWidth<A>;
  // Addresses are shared too: a thread has no registers for what makes them.
  __shared__ TokenWindow<> window;
  __shared__ TokenRows<A, Path> rows_of_window[kWindow];
  const GateForwardArgs& gate = a.gate;
  const int hidden = static_cast<int>(gate.hidden);
  const unsigned parts = static_cast<unsigned>(gate.streams) * segments;
  const unsigned part = blockIdx.x % parts;
  const int64_t chunk = blockIdx.x / parts;
  const int64_t h = part / segments;
  const int width = static_cast<int>(blockDim.x) * kColumns;
  const int packs = (hidden + kColumns - 1) / kColumns;
  const int begin = static_cast<int>(part % segments) * width;
  const auto share = [&](int64_t i) { return static_cast<int>(packs * i / parts) * kColumns; };
  const Segment of_block = {begin, begin + width, share(part), share(part + 1)};
  const int at = begin + static_cast<int>(threadIdx.x) * kColumns;
  const int count = hidden - at;
  const float* weight = gate.weight_fused + h * gate.weight_stream_stride + at;
  const int64_t end = min(gate.tokens, (chunk + 1) * chunk_tokens);
  float grad_weight[kColumns] = {};
  int64_t window_begin = chunk * chunk_tokens;
  int64_t window_end = window_begin;
  int turn = 0;
#pragma unroll 1
  for (int64_t t = window_begin; t < end; ++t) {
    if (t == window_end) {
      window_begin = t;
      window_end = min(end, t + kWindow);
      window.fill(gate, scale, t, window_end, h,
                  [&](int i, int64_t of) { rows_of_window[i] = rows_of<A, Path>(a, of, h); });
    }
    const int of_window = static_cast<int>(t - window_begin);
    const TokenScalars& of_token = window.scalars[of_window][0];
    const TokenRows<A, Path>& rows = rows_of_window[of_window];
    if (of_token.is_image) {
      write_image_token<A, kVector>(rows, of_block, hidden);
      continue;
    }
    Pack g{}, x{}, k{};
    float sum =
        grad_alpha_elsewhere<A, kVector>(rows.value_path, rows.value, 0, begin, hidden, 0.0f);
    if (count > 0) {
      PathPack<A, Path> path;
      if constexpr (kSeparate) path.template load<kVector>(rows.value_path + at, count);
      g = load_passing<kVector>(rows.grad_out + at, count);
      const Pack v = load_passing<kVector>(rows.value + at, count);
      x = load_passing<kVector>(rows.residual + at, count);
      k = load_passing<kVector>(rows.key + at, count);
      if constexpr (kSeparate) {
        sum = grad_alpha_of<A>(path, v, sum);
      } else {
        sum = grad_alpha_of<A>(PathPack<A, A>{g}, v, sum);
      }
    }
    sum = grad_alpha_elsewhere<A, kVector>(rows.value_path, rows.value, of_block.end, hidden,
                                           hidden, sum);
    WarpSums<1>& sums = window.sums[turn ^= 1];
    sums.put({sum});
    __syncthreads();
    const Slopes slopes(of_token, sums.total(0));
    if (count > 0) {
      float w[kColumns];
      load_weights<kColumns, kVector>(weight, count, w);
      gate_gradients<A>(slopes, g, x, k, w, grad_weight,
                        [&](const Pack& of_residual, const Pack& of_key) {
                          cuda::store_pack<kVector>(rows.grad_residual + at, of_residual, count);
                          cuda::store_pack<kVector>(rows.grad_key + at, of_key, count);
                        });
    }
    write_grad_value<A, kVector>(a, rows.value_path - h * a.grad_value_path.stream_stride,
                                 rows.grad_value, of_block, window.alpha[of_window]);
  }
  store_sums(partials.data + chunk * partials.chunk_stride + h * partials.stream_stride + at, count,
             grad_weight);
}

// The sum of a chunk from those of its tokens: a thread per column.
struct ChunkOfTokens {
  GradWeightPartials partials;
  int64_t tokens, chunk_tokens, streams, hidden;

  __device__ void operator()(int64_t at) const {
    const int64_t row = streams * hidden;
    const int64_t chunk = at / row;
    const float* of_token = partials.by_token + at % row;
    const int64_t end = min(tokens, (chunk + 1) * chunk_tokens);
    float sum = 0;
#pragma unroll 8
    for (int64_t t = chunk * chunk_tokens; t < end; ++t) sum += __ldg(of_token + t * row);
    partials.data[chunk * partials.chunk_stride + at % row / hidden * partials.stream_stride +
                  at % hidden] = sum;
  }
};

}  // namespace

void gate_bwd_cuda(const GateBackwardArgs& a, const GradWeightPartials& partials, int device,
                   void* stream) {
  const GateForwardArgs& gate = a.gate;
  if (gate.tokens == 0) return;
  const auto size = static_cast<int64_t>(size_of(gate.activation));
  const auto fits = [&](const GradientRows& rows, bool is_f32 = false) {
    return is_vector(rows.data, is_f32 ? 4 : size, rows.token_stride, rows.stream_stride);
  };
  const bool vector = are_vectors(gate) && fits(a.grad_out) &&
                      fits(a.grad_value_path, a.value_path_is_f32) && fits(a.grad_residual) &&
                      fits(a.grad_key) && fits(a.grad_value);
  const bool same = a.grad_value_path.data == a.grad_out.data &&
                    a.grad_value_path.token_stride == a.grad_out.token_stride &&
                    a.grad_value_path.stream_stride == a.grad_out.stream_stride;
  with_rows(gate.activation, vector, [&](auto activation, auto vectors) {
    using A = decltype(activation);
    const int threads = gate_bwd_threads<A>(gate);
    const int64_t columns = int64_t{threads} * kWidth<A>;
    const int64_t segments = (gate.hidden + columns - 1) / columns;
    const int64_t chunk_tokens = tokens_of_chunk(gate.tokens);
    const int64_t chunks = chunks_of_tokens(gate.tokens);
    const bool by_token = partials.by_token != nullptr;
    if constexpr (sizeof(A) == 2 && vectors()) {
      if (same && !a.value_path_is_f32 && segments == 1) {
        const auto special = by_token ? &gate_bwd_of_few<A> : &walk_gate_bwd<A>;
        if (special(a, partials, chunk_tokens, chunks, device, stream)) return;
      }
    }
    const auto kernel = a.value_path_is_f32 ? &gate_bwd<A, vectors(), float, true>
                        : same              ? &gate_bwd<A, vectors(), A, false>
                                            : &gate_bwd<A, vectors(), A, true>;
    const int64_t row = gate.streams * gate.hidden;
    cuda::launch_overlapping(
        "engram.gate_bwd", device, stream, kernel,
        dim3(cuda::blocks((by_token ? gate.tokens : chunks) * gate.streams * segments)),
        dim3(static_cast<unsigned>(threads)), 0, a,
        by_token ? GradWeightPartials{partials.by_token, row, gate.hidden} : partials,
        by_token ? 1 : chunk_tokens, gate_scale<float>(gate.hidden), segments);
    if (by_token) {
      cuda::launch_each(
          "engram.gate_bwd", device, stream, chunks * row,
          ChunkOfTokens{partials, gate.tokens, chunk_tokens, gate.streams, gate.hidden});
    }
  });
}

}  // namespace ehc::engram
