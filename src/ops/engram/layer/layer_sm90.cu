// engram.layer_fwd with a convolution in one kernel, for bf16, four taps and d up to 7168 (sm_90).
//
//   H' = round(x + alpha*v + silu(c)), c[t] = sum_k W[k] * u[t - (3-k)*dilation]
//   u = (v * beta) * g, beta = alpha / sqrt(alpha^2 mean(v^2) + eps)
//   x, k, H' A[T,n,d]; v A[T,d]; weights W[n,d]; alpha, beta of a token and stream, as in the gate
//
// Bytes: (6n+2)d a token in 16-bit types, as the gate alone: x, k, v read once, H' written once; n-1
// of n reads of v come from the caches. The 3*dilation tokens before a run are read again.
// Algorithm: a block takes a stream and a run of tokens, along the chains of tokens `dilation` apart
// (conv_rows.cuh), so that the sums of the taps to come stay in registers and so do the weights. A
// ring of stages in shared memory holds x, k and v of the tokens to come; its rows are brought by the
// copy engine. Every thread takes its part of the sums of a token, then finishes the token before it:
// meanwhile one more warp makes alpha and beta of the sums and asks for the next rows. Warps wait for
// data alone, never for each other.
// Bits: those of the gate and the convolution as two kernels (layer_cuda.cu). Class R, for each
// thread adds the packs that are its own in gate_fwd; batch-invariant: no bit depends on the runs.
#include <cstdlib>
#include <string_view>

#include "backends/cuda/bulk_copy.cuh"
#include "core/forced_grid.h"
#include "ops/engram/layer/layer_args.h"
#include "ops/engram/shared/conv_rows.cuh"
#include "ops/engram/shared/gate_rows.cuh"
#include "ops/engram/shared/layer_rows.cuh"

namespace ehc::engram {

namespace {

using A = cuda::Bf16;
using cuda::PhaseBarrier;

constexpr int kColumns = kWidth<A>;
constexpr int kMostStages = 8;
constexpr int kMostWarps = 14;  // of a row of sums: d up to 7168
constexpr int kFewWarps = 8;    // d up to 4096
constexpr const char* kName = "engram.layer_fwd";

// What is known of a token of a chain.
struct ChainToken {
  int64_t token;
  bool writes;  // it is of the run, not of the history before it
  bool starts;  // nothing of its sequence was before it in this chain
  bool image;
  bool last;
};

// The tokens of a run: those `dilation` apart after their history, then those beside them.
class ChainWalk {
 public:
  __device__ ChainWalk(const LayerForwardArgs& a, int64_t begin, int64_t end)
      : a_(a),
        begin_(begin),
        end_(end),
        dilation_(a.conv.dilation),
        residues_(min(a.conv.dilation, end - begin)),
        cursor_(a.conv, a.gate.tokens, begin) {
    start();
  }
  [[nodiscard]] __device__ bool ended() const { return residue_ == residues_; }
  __device__ ChainToken next() {
    const SequenceAt& sequence = cursor_.of(max(token_, begin_ + residue_));
    ChainToken now{token_, token_ >= begin_, is_first_ || token_ - dilation_ < sequence.begin,
                   image_, false};
    token_ += dilation_;
    is_first_ = false;
    if (token_ >= end_) {
      ++residue_;
      now.last = ended();
      if (now.last) return now;
      cursor_ = SequenceCursor(a_.conv, a_.gate.tokens, begin_);
      start();
    }
    image_ = is_image(a_.gate.image_token_mask, token_);
    return now;
  }

 private:
  __device__ void start() {
    const int64_t first = begin_ + residue_;
    const int64_t before = (first - cursor_.of(first).begin) / dilation_;
    token_ = first - min(before, int64_t{kChainTaps - 1}) * dilation_;
    is_first_ = true;
    image_ = is_image(a_.gate.image_token_mask, token_);
  }

  const LayerForwardArgs& a_;
  int64_t begin_, end_, dilation_, residues_;
  int64_t residue_ = 0;
  int64_t token_ = 0;
  bool is_first_ = true;
  bool image_ = false;  // of token_, asked for a step ahead
  SequenceCursor cursor_;
};

// A stage of the ring, without its rows.
struct Stage {
  PhaseBarrier rows;  // x, k and v are there
  PhaseBarrier sums;  // every warp has put its sums
  PhaseBarrier gate;  // alpha and beta are there
  ChainToken token;
  A* out;  // its row of H'
  float alpha, beta;
  float of_warp[GateSums::kCount][kMostWarps];
};

// Position in the ring.
struct Turn {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// Keeps a branch a branch, where the compiler would rather take both sides.
__device__ __forceinline__ void rarely() { asm volatile(""); }

// Of two sums over the lanes of a warp, as warp_sum of each: the upper half of the lanes has b.
__device__ __forceinline__ float halve(bool upper, float a, float b, int distance) {
  return (upper ? b : a) + __shfl_xor_sync(cuda::kAllLanes, upper ? a : b, distance);
}
__device__ __forceinline__ float finish_sum(float x, int distance) {
  for (; distance > 0; distance /= 2) x += __shfl_xor_sync(cuda::kAllLanes, x, distance);
  return x;
}
__device__ __forceinline__ float two_warp_sums(float a, float b) {
  return finish_sum(halve((threadIdx.x & 16) != 0, a, b, 16), 8);
}
// The same of four: lane l has number l / 8.
__device__ __forceinline__ float four_warp_sums(const float (&sum)[4]) {
  const bool upper = (threadIdx.x & 16) != 0;
  const float a = halve(upper, sum[0], sum[2], 16);
  const float b = halve(upper, sum[1], sum[3], 16);
  return finish_sum(halve((threadIdx.x & 8) != 0, a, b, 8), 4);
}

// Weights of the convolution of a thread's columns, in registers as they came.
struct ChainWeights {
  Pack taps[kChainTaps];  // of two columns each
  Pack norms;

  __device__ __forceinline__ void load(const ShortConv& conv, int64_t h, int64_t first) {
    norms = cuda::load_pack<true>(
        static_cast<const A*>(conv.norm_weight) + h * conv.norm_weight_stream_stride + first,
        kColumns);
    const A* from = static_cast<const A*>(conv.conv_weight) + h * conv.conv_weight_stream_stride +
                    first * kChainTaps;
#pragma unroll
    for (int q = 0; q < kChainTaps; ++q) {
      taps[q] = cuda::load_pack<true>(from + q * kColumns, kColumns);
    }
  }
};

// The same as floats, column by column.
template <bool kPacked>
struct ColumnWeights {
  float tap[kChainTaps][kColumns];
  float norm[kColumns];

  __device__ __forceinline__ void widen(const ChainWeights& w, int q) {
#pragma unroll
    for (int i = 2 * q; i < 2 * q + 2; ++i) {
      norm[i] = column<A>(w.norms, i);
#pragma unroll
      for (int k = 0; k < kChainTaps; ++k) tap[k][i] = column<A>(w.taps[q], i % 2 * 4 + k);
    }
  }
};

// Shared memory of a block.
struct Ring {
  Stage* stage;  // [stages]
  A* rows;       // [stages, 3, d]: x, k, v
  float* weight;  // [d], of the gate
  int stages;
  int hidden;

  __device__ __forceinline__ Ring(unsigned char* memory, int stage_count, int columns)
      : stage(reinterpret_cast<Stage*>(memory)), stages(stage_count), hidden(columns) {
    rows = reinterpret_cast<A*>(memory + bytes_of_stages(stage_count));
    weight = reinterpret_cast<float*>(rows + int64_t{3} * stage_count * columns);
  }
  __device__ __forceinline__ A* row(int s, int r) const { return rows + (s * 3 + r) * hidden; }
  __device__ __forceinline__ Pack pack(int s, int r, int at) const {
    return *reinterpret_cast<const Pack*>(row(s, r) + at);
  }
  struct Weights {
    float value[kColumns];
  };
  __device__ __forceinline__ Weights weights(int at) const {
    Weights w;
#pragma unroll
    for (int i = 0; i < kColumns; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(weight + at + i);
      w.value[i] = four.x, w.value[i + 1] = four.y, w.value[i + 2] = four.z;
      w.value[i + 3] = four.w;
    }
    return w;
  }
  __host__ __device__ static int bytes_of_stages(int stages) {
    return (stages * static_cast<int>(sizeof(Stage)) + 127) / 128 * 128;
  }
};

int64_t ring_bytes(int stages, int64_t hidden) {
  return Ring::bytes_of_stages(stages) +
         hidden * (stages * 3 * int64_t{sizeof(A)} + int64_t{sizeof(float)});
}

// The warp that leads: asks for rows and makes scalars of sums.
__device__ __forceinline__ void lead(const LayerForwardArgs& a, const Ring& ring, float scale,
                                     int64_t begin, int64_t end, int64_t h, int warps, int lag) {
  const int lane = static_cast<int>(threadIdx.x) % cuda::kWarp;
  ChainWalk walk(a, begin, end);
  const unsigned row_bytes = static_cast<unsigned>(ring.hidden) * sizeof(A);
  const auto ask = [&](int s) {
    if (walk.ended()) return;
    const ChainToken token = walk.next();
    if (lane != 0) return;
    Stage& stage = ring.stage[s];
    stage.token = token;
    stage.out = out_row<A>(a.gate, token.token, h);
    stage.rows.arrive_expecting(token.image ? row_bytes : 3 * row_bytes);
    cuda::copy_row(ring.row(s, 0), residual_row<A>(a.gate, token.token, h), row_bytes, stage.rows);
    if (token.image) return;
    cuda::copy_row(ring.row(s, 1), key_row<A>(a.gate, token.token, h), row_bytes, stage.rows);
    cuda::copy_row(ring.row(s, 2), value_row<A>(a.gate, token.token), row_bytes, stage.rows);
  };
  for (int s = 0; s < ring.stages; ++s) ask(s);
  Turn turn;
  int left = -1 - lag;  // the stage that all warps have left once they have put the sums of this one
  for (;;) {
    Stage& stage = ring.stage[turn.stage];
    stage.sums.wait(turn.parity);
    float of_lane[GateSums::kCount];
#pragma unroll
    for (int k = 0; k < GateSums::kCount; ++k) {
      of_lane[k] = lane < warps ? stage.of_warp[k][lane] : 0.0f;
    }
    const float sum = four_warp_sums(of_lane);
    // Of its sum every lane makes what its sum may be needed for: the roots and quotients take long.
    const float mean = sum / static_cast<float>(a.gate.hidden);
    const float rstd = reciprocal_rms(sum, a.gate.hidden, a.gate.eps);
    const auto of = [](float x, int number) {
      return __shfl_sync(cuda::kAllLanes, x, number * (cuda::kWarp / GateSums::kCount));
    };
    GateScalars scalars =
        gate_scalars_of_norms(of(rstd, 0), of(rstd, 1), of(sum, 2), a.gate, scale);
    const float beta = conv_beta(scalars.alpha, of(mean, 3), a.conv.eps);
    const ChainToken token = stage.token;
    if (lane == 0) {
      if (token.image) scalars = {};
      stage.alpha = scalars.alpha;
      stage.beta = beta;
      stage.gate.arrive();
      if (token.writes) save(a.gate, token.token, h, scalars);
    }
    if (token.last) return;
    if (left >= 0) ask(left);
    if (++left == ring.stages) left = 0;
    turn.advance(ring.stages);
  }
}

// Block b takes run b / n of stream b % n. `threads` are those that take columns, kPacks packs each;
// one more warp leads.
template <int kThreads, int kPacks, bool kPacked, bool kTwice>
__global__ void __launch_bounds__(kThreads, 1)
    layer_chains(const __grid_constant__ LayerForwardArgs a, float scale, int64_t run, int stages,
                 int lag) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  extern __shared__ __align__(128) unsigned char memory[];
  const auto streams = static_cast<unsigned>(a.gate.streams);
  const int64_t h = blockIdx.x % streams;
  const int64_t begin = blockIdx.x / streams * run;
  const int64_t end = min(a.gate.tokens, begin + run);
  const int hidden = static_cast<int>(a.gate.hidden);
  const Ring ring(memory, stages, hidden);
  const int threads = static_cast<int>(blockDim.x) - cuda::kWarp;
  const int warp = static_cast<int>(threadIdx.x) / cuda::kWarp;
  const int warps = threads / cuda::kWarp;
  // Threads of the gate's sums, each with the packs of its number and so many further.
  const int sum_threads = threads * kPacks / kGatePacks;
  const int sum_warps = sum_threads / cuda::kWarp;
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      ring.stage[s].rows.init(1);
      ring.stage[s].sums.init(warps);
      ring.stage[s].gate.init(1);
    }
    cuda::publish_barriers();
  }
  const int first = static_cast<int>(threadIdx.x) * kColumns;
  const int step = threads * kColumns;
  ChainWeights weights[kPacks] = {};
  ColumnWeights<kPacked> wide[kPacks] = {};
  ConvChain<kColumns> chain[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int at = first + p * step;
    chain[p].clear();
    if (warp == warps || at >= hidden) continue;
    weights[p].load(a.conv, h, at);
    if constexpr (!kPacked) {
#pragma unroll
      for (int q = 0; q < kChainTaps; ++q) wide[p].widen(weights[p], q);
    }
    const auto row = [&](const StreamWeight& w) {
      return cuda::load_pack<true>(static_cast<const A*>(w.data) + h * w.stream_stride + at,
                                   kColumns);
    };
    const Pack of_hidden = row(a.hidden_weight);
    const Pack of_embed = row(a.embed_weight);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      ring.weight[at + i] = column<A>(of_hidden, i) * column<A>(of_embed, i);
    }
  }
  __syncthreads();
  if (warp == warps) return lead(a, ring, scale, begin, end, h, sum_warps, lag);

  const int lane = static_cast<int>(threadIdx.x) % cuda::kWarp;
  const auto put_sums = [&](int s) {
    Stage& stage = ring.stage[s];
    if constexpr (kPacks == kGatePacks) {
      GateSums sums;
#pragma unroll
      for (int p = 0; p < kGatePacks; ++p) {
        const int at = first + p * step;
        if (at >= hidden) continue;
        sums.add<A>(ring.pack(s, 0, at), ring.pack(s, 1, at), ring.weights(at).value);
        sums.add_value<A>(ring.pack(s, 2, at));
      }
      const float sum = four_warp_sums(sums.sum);
      if (lane % 8 == 0) stage.of_warp[lane / 8][warp] = sum;
    } else {
      // Half of the threads take x^2 and (x * wf) * k, the others k^2 and v^2.
      const bool second = warp >= sum_warps;
      float sum[2] = {};
#pragma unroll
      for (int p = 0; p < kGatePacks; ++p) {
        const int at = first + ((second ? -1 : 0) + p) * sum_threads * kColumns;
        if (at >= hidden) continue;
        const Pack k = ring.pack(s, 1, at);
        if (second) {
          add_squares<A>(k, sum[0]);
          add_squares<A>(ring.pack(s, 2, at), sum[1]);
        } else {
          const Pack x = ring.pack(s, 0, at);
          add_squares<A>(x, sum[0]);
          add_products<A>(x, k, ring.weights(at).value, sum[1]);
        }
      }
      const float both = two_warp_sums(sum[0], sum[1]);
      if (lane % 16 == 0) {
        stage.of_warp[lane / 16 * 2 + (second ? 1 : 0)][second ? warp - sum_warps : warp] = both;
      }
    }
    __syncwarp();
    if (lane == 0) stage.sums.arrive();
  };
  const auto finish = [&](int s) {
    const Stage& stage = ring.stage[s];
    const bool writes = stage.token.writes;
    const bool image = stage.token.image;
    const float alpha = stage.alpha;
    const float beta = stage.beta;
    A* out = stage.out + first;
    if (stage.token.starts) {
      rarely();
#pragma unroll
      for (auto& sums : chain) sums.clear();
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int at = first + p * step;
      if (at >= hidden) continue;
      const Pack x = ring.pack(s, 0, at);
      const Pack v = ring.pack(s, 2, at);
      float c[kColumns];
#pragma unroll
      for (int q = 0; q < kColumns / 2; ++q) {
        if constexpr (kPacked) {
          // Not widened before their turn: there are no registers for it.
          keep_packed(weights[p].taps[q]);
          asm volatile("" : "+r"(weights[p].norms.word[q]));
          wide[p].widen(weights[p], q);
        }
#pragma unroll
        for (int i = 2 * q; i < 2 * q + 2; ++i) {
          const float u = conv_normalised(column<A>(v, i), beta, wide[p].norm[i]);
          c[i] = chain[p].step(i, image ? 0.0f : u, wide[p].tap);
        }
      }
      Pack y = x;
      if (writes && !image) y = layer_pack<A, kTwice>(alpha, v, x, c);
      if (writes) cuda::store_pack<true>(out + p * step, y, kColumns);
    }
  };

  Turn ahead, behind;
  bool more = true;
  for (int between = 0;; --between) {
    for (; more && between <= lag; ++between) {
      ring.stage[ahead.stage].rows.wait(ahead.parity);
      put_sums(ahead.stage);
      more = !ring.stage[ahead.stage].token.last;
      ahead.advance(stages);
    }
    ring.stage[behind.stage].gate.wait(behind.parity);
    const bool last = ring.stage[behind.stage].token.last;
    finish(behind.stage);
    if (last) return;
    behind.advance(stages);
  }
#endif
}

constexpr int kOnePackThreads = (2 * kFewWarps + 1) * cuda::kWarp;
constexpr int kTwoPackThreads = (kMostWarps + 1) * cuda::kWarp;

// Calls body(kernel) for a call.
template <class Body>
void with_kernel(int kind, bool twice, const Body& body) {
  if (kind == 0) {
    body(twice ? &layer_chains<kTwoPackThreads, 2, true, true>
               : &layer_chains<kTwoPackThreads, 2, true, false>);
  } else if (kind == 1) {
    body(twice ? &layer_chains<kOnePackThreads, 1, false, true>
               : &layer_chains<kOnePackThreads, 1, false, false>);
  } else {
    body(twice ? &layer_chains<kOnePackThreads, 1, true, true>
               : &layer_chains<kOnePackThreads, 1, true, false>);
  }
}

bool is_major(int device, int wanted) {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == wanted;
}

}  // namespace

std::string_view layer_fwd_sm90_refusal(const LayerForwardArgs& a, int device) {
  const GateForwardArgs& gate = a.gate;
  const ShortConv& conv = a.conv;
  if (conv.conv_weight == nullptr) return "no convolution";
  if (gate.activation != DType::bf16) return "activations are not BF16";
  if (conv.taps != kChainTaps) return "not four taps";
  if (conv.state.data != nullptr || conv.next_state.data != nullptr) return "a state";
  constexpr int64_t kMost = int64_t{kMostWarps} * cuda::kWarp * kGatePacks * kColumns;
  if (gate.hidden > kMost) return "d is above 7168";
  const StreamWeight norm = {conv.norm_weight_type, conv.norm_weight,
                             conv.norm_weight_stream_stride};
  const StreamWeight taps = {conv.weight, conv.conv_weight, conv.conv_weight_stream_stride};
  for (const StreamWeight& w : {a.hidden_weight, a.embed_weight, norm, taps}) {
    if (w.type != DType::bf16) return "weights are not BF16";
    if (!is_vector(w.data, sizeof(A), w.stream_stride, 0)) {
      return "weights are not aligned to 16 bytes";
    }
  }
  if (conv.conv_weight_channel_stride != kChainTaps) return "taps are not packed";
  if (!are_vectors(gate) ||
      !is_vector(gate.out, sizeof(A), gate.out_token_stride, gate.out_stream_stride)) {
    return "rows are not aligned to 16 bytes";
  }
  return is_major(device, 9) ? "" : "the device is not of compute capability 9";
}

void layer_fwd_sm90(const LayerForwardArgs& a, int device, void* stream) {
  if (a.gate.tokens == 0) return;
  const int sum_threads = gate_threads(a.gate);
  int kind = sum_threads > kFewWarps * cuda::kWarp ? 0 : 1;
  if (const char* e = getenv("LAYER_KIND")) kind = kind == 0 ? 0 : atoi(e);
  const int block = (kind == 0 ? 1 : 2) * sum_threads + cuda::kWarp;
  // Blocks of a processor: as many as its registers hold.
  const int of_processor = (kind == 0 ? kTwoPackThreads : kOnePackThreads) / block;
  const auto most = static_cast<int64_t>(most_shared(kName, device)) / of_processor - 1024;
  int lag = 1;
  if (const char* e = getenv("LAYER_LAG")) lag = atoi(e);
  int stages = kMostStages;
  if (const char* e = getenv("LAYER_STAGES")) stages = atoi(e);
  while (stages > 3 && ring_bytes(stages, a.gate.hidden) > most) --stages;
  const auto bytes = static_cast<size_t>(ring_bytes(stages, a.gate.hidden));
  with_kernel(kind, a.round_twice, [&](auto kernel) {
    const int64_t blocks = free_blocks(resident_blocks(kName, device, kernel, block, bytes));
    const int64_t runs = std::max<int64_t>(1, blocks / a.gate.streams);
    const int64_t run = (a.gate.tokens + runs - 1) / runs;
    cuda::launch(kName, device, stream, kernel,
                 dim3(cuda::blocks((a.gate.tokens + run - 1) / run * a.gate.streams)),
                 dim3(static_cast<unsigned>(block)), bytes, a,
                 gate_scale<float>(a.gate.hidden), run, stages, lag);
  });
}

}  // namespace ehc::engram
