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
constexpr int kMostWarps = 14;  // that take columns: d up to 7168
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

// The sums over the lanes of a warp, as warp_sum of each: lane l has that of number l / 8.
__device__ __forceinline__ float four_warp_sums(const float (&sum)[GateSums::kCount]) {
  static_assert(GateSums::kCount == 4);
  const auto exchange = [](bool upper, float low, float high, int distance) {
    const float sent = upper ? low : high;
    return (upper ? high : low) + __shfl_xor_sync(cuda::kAllLanes, sent, distance);
  };
  const bool upper = (threadIdx.x & 16) != 0;
  const float low = exchange(upper, sum[0], sum[2], 16);
  const float high = exchange(upper, sum[1], sum[3], 16);
  float x = exchange((threadIdx.x & 8) != 0, low, high, 8);
#pragma unroll
  for (int distance = 4; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(cuda::kAllLanes, x, distance);
  }
  return x;
}

__device__ __forceinline__ float fused_weight(const LayerForwardArgs& a, int64_t h, int64_t i) {
  return load_float(a.hidden_weight.data, a.hidden_weight.type,
                    h * a.hidden_weight.stream_stride + i) *
         load_float(a.embed_weight.data, a.embed_weight.type,
                    h * a.embed_weight.stream_stride + i);
}

// Weights of the convolution of a thread's columns in registers, as floats or as they came.
template <bool kPacked>
struct ChainWeights;

template <>
struct ChainWeights<false> {
  float tap[kChainTaps][kColumns];
  float norm[kColumns];

  __device__ __forceinline__ void load(const ShortConv& conv, int64_t h, int64_t first) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      norm[i] = norm_weight(conv, h, first + i);
#pragma unroll
      for (int k = 0; k < kChainTaps; ++k) tap[k][i] = tap_weight(conv, h, first + i, k);
    }
  }
  __device__ __forceinline__ const ChainWeights& wide() { return *this; }
};

template <>
struct ChainWeights<true> {
  Pack taps[kChainTaps];
  Pack norms;

  __device__ __forceinline__ void load(const ShortConv& conv, int64_t h, int64_t first) {
    ChainWeights<false> w;
    w.load(conv, h, first);
    norms = cuda::make_pack<A>([&](int i) { return w.norm[i]; });
#pragma unroll
    for (int k = 0; k < kChainTaps; ++k) {
      taps[k] = cuda::make_pack<A>([&](int i) { return w.tap[k][i]; });
    }
  }
  __device__ __forceinline__ ChainWeights<false> wide() {
    ChainWeights<false> w;
    keep_packed(norms);
#pragma unroll
    for (int k = 0; k < kChainTaps; ++k) keep_packed(taps[k]);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      w.norm[i] = column<A>(norms, i);
#pragma unroll
      for (int k = 0; k < kChainTaps; ++k) w.tap[k][i] = column<A>(taps[k], i);
    }
    return w;
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
                                     int64_t begin, int64_t end, int64_t h, int warps) {
  const int lane = static_cast<int>(threadIdx.x) % cuda::kWarp;
  ChainWalk walk(a, begin, end);
  const unsigned row_bytes = static_cast<unsigned>(ring.hidden) * sizeof(A);
  const auto ask = [&](int s) {
    if (walk.ended()) return;
    const ChainToken token = walk.next();
    if (lane != 0) return;
    Stage& stage = ring.stage[s];
    stage.token = token;
    stage.rows.arrive_expecting(token.image ? row_bytes : 3 * row_bytes);
    cuda::copy_row(ring.row(s, 0), residual_row<A>(a.gate, token.token, h), row_bytes, stage.rows);
    if (token.image) return;
    cuda::copy_row(ring.row(s, 1), key_row<A>(a.gate, token.token, h), row_bytes, stage.rows);
    cuda::copy_row(ring.row(s, 2), value_row<A>(a.gate, token.token), row_bytes, stage.rows);
  };
  for (int s = 0; s < ring.stages; ++s) ask(s);
  Turn turn;
  int left = -2;  // the stage that all warps have left once they have put the sums of this one
  for (;;) {
    Stage& stage = ring.stage[turn.stage];
    stage.sums.wait(turn.parity);
    float of_lane[GateSums::kCount];
#pragma unroll
    for (int k = 0; k < GateSums::kCount; ++k) {
      of_lane[k] = lane < warps ? stage.of_warp[k][lane] : 0.0f;
    }
    const float sum = four_warp_sums(of_lane);
    float total[GateSums::kCount];
#pragma unroll
    for (int k = 0; k < GateSums::kCount; ++k) {
      total[k] = __shfl_sync(cuda::kAllLanes, sum, k * 8);
    }
    const ChainToken token = stage.token;
    if (lane == 0) {
      GateScalars s{};
      float beta = 0;
      if (!token.image) {
        s = gate_scalars(total[0], total[1], total[2], a.gate, scale);
        beta = conv_beta(s.alpha, total[3] / static_cast<float>(a.gate.hidden), a.conv.eps);
      }
      stage.alpha = s.alpha;
      stage.beta = beta;
      stage.gate.arrive();
      if (token.writes) save(a.gate, token.token, h, s);
    }
    if (token.last) return;
    if (left >= 0) ask(left);
    if (++left == ring.stages) left = 0;
    turn.advance(ring.stages);
  }
}

// Block b takes run b / n of stream b % n. Its last warp leads.
template <int kThreads, bool kPacked, bool kTwice>
__global__ void __launch_bounds__(kThreads, 1)
    layer_chains(const __grid_constant__ LayerForwardArgs a, float scale, int64_t run, int stages) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  extern __shared__ __align__(128) unsigned char memory[];
  const auto streams = static_cast<unsigned>(a.gate.streams);
  const int64_t h = blockIdx.x % streams;
  const int64_t begin = blockIdx.x / streams * run;
  const int64_t end = min(a.gate.tokens, begin + run);
  const int hidden = static_cast<int>(a.gate.hidden);
  const Ring ring(memory, stages, hidden);
  const int threads = static_cast<int>(blockDim.x) - cuda::kWarp;  // that take columns
  const int warp = static_cast<int>(threadIdx.x) / cuda::kWarp;
  const int warps = threads / cuda::kWarp;
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      ring.stage[s].rows.init(1);
      ring.stage[s].sums.init(warps);
      ring.stage[s].gate.init(1);
    }
    cuda::publish_barriers();
  }
  __syncthreads();
  if (warp == warps) return lead(a, ring, scale, begin, end, h, warps);

  const int first = static_cast<int>(threadIdx.x) * kColumns;
  const int step = threads * kColumns;
  ChainWeights<kPacked> weights[kGatePacks] = {};
  ConvChain<kColumns> chain[kGatePacks];
#pragma unroll
  for (int p = 0; p < kGatePacks; ++p) {
    chain[p].clear();
    if (first + p * step >= hidden) continue;
    weights[p].load(a.conv, h, first + p * step);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int at = first + p * step + i;
      ring.weight[at] = fused_weight(a, h, at);
    }
  }

  const auto put_sums = [&](int s) {
    GateSums of_thread;
#pragma unroll
    for (int p = 0; p < kGatePacks; ++p) {
      const int at = first + p * step;
      if (at >= hidden) continue;
      float weight[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(ring.weight + at + i);
        weight[i] = four.x, weight[i + 1] = four.y, weight[i + 2] = four.z, weight[i + 3] = four.w;
      }
      of_thread.add<A>(ring.pack(s, 0, at), ring.pack(s, 1, at), weight);
      of_thread.add_value<A>(ring.pack(s, 2, at));
    }
    const float sum = four_warp_sums(of_thread.sum);
    const int lane = static_cast<int>(threadIdx.x) % cuda::kWarp;
    if (lane % 8 == 0) ring.stage[s].of_warp[lane / 8][warp] = sum;
    __syncwarp();
    if (lane == 0) ring.stage[s].sums.arrive();
  };
  const auto finish = [&](int s) {
    const Stage& stage = ring.stage[s];
    const ChainToken token = stage.token;
    const float alpha = stage.alpha;
    const float beta = stage.beta;
    A* out = out_row<A>(a.gate, token.token, h) + first;
#pragma unroll
    for (int p = 0; p < kGatePacks; ++p) {
      const int at = first + p * step;
      if (at >= hidden) continue;
      if (token.starts) chain[p].clear();
      const auto& w = weights[p].wide();
      const Pack x = ring.pack(s, 0, at);
      Pack y = x;
      if (token.image) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) chain[p].step(i, 0.0f, w.tap);
      } else {
        const Pack v = ring.pack(s, 2, at);
        float c[kColumns];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          c[i] = chain[p].step(i, conv_normalised(column<A>(v, i), beta, w.norm[i]), w.tap);
        }
        if (token.writes) y = layer_pack<A, kTwice>(alpha, v, x, c);
      }
      if (token.writes) cuda::store_pack<true>(out + p * step, y, kColumns);
    }
  };

  Turn turn;
  ring.stage[0].rows.wait(0);
  put_sums(0);
  for (;;) {
    const Turn now = turn;
    const bool last = ring.stage[now.stage].token.last;
    turn.advance(stages);
    if (!last) {
      ring.stage[turn.stage].rows.wait(turn.parity);
      put_sums(turn.stage);
    }
    ring.stage[now.stage].gate.wait(now.parity);
    finish(now.stage);
    if (last) return;
  }
#endif
}

constexpr int kWideThreads = (8 + 1) * cuda::kWarp;                // d up to 4096
constexpr int kPackedThreads = (kMostWarps + 1) * cuda::kWarp;     // d up to 7168

// Calls body(kernel) for a call.
template <class Body>
void with_kernel(bool packed, bool twice, const Body& body) {
  if (packed) {
    body(twice ? &layer_chains<kPackedThreads, true, true>
               : &layer_chains<kPackedThreads, true, false>);
  } else {
    body(twice ? &layer_chains<kWideThreads, false, true>
               : &layer_chains<kWideThreads, false, false>);
  }
}

bool has_packed_weights(const ShortConv& conv) {
  return conv.weight == DType::bf16 && conv.norm_weight_type == DType::bf16;
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
  if (gate_threads(gate) >= kWideThreads && !has_packed_weights(conv)) {
    return "F32 weights and d above 4096";
  }
  if (!are_vectors(gate) ||
      !is_vector(gate.out, sizeof(A), gate.out_token_stride, gate.out_stream_stride)) {
    return "rows are not aligned to 16 bytes";
  }
  return is_major(device, 9) ? "" : "the device is not of compute capability 9";
}

void layer_fwd_sm90(const LayerForwardArgs& a, int device, void* stream) {
  if (a.gate.tokens == 0) return;
  const int threads = gate_threads(a.gate) + cuda::kWarp;
  bool packed = threads > kWideThreads;
  if (const char* e = getenv("LAYER_PACKED")) packed = packed || atoi(e) != 0;
  // Blocks of a processor: as many as its registers hold.
  const int of_processor = (packed ? kPackedThreads : kWideThreads) / threads;
  const auto most = static_cast<int64_t>(most_shared(kName, device)) / of_processor - 1024;
  int stages = kMostStages;
  if (const char* e = getenv("LAYER_STAGES")) stages = atoi(e);
  while (stages > 3 && ring_bytes(stages, a.gate.hidden) > most) --stages;
  const auto bytes = static_cast<size_t>(ring_bytes(stages, a.gate.hidden));
  with_kernel(packed, a.round_twice, [&](auto kernel) {
    const int64_t blocks = free_blocks(resident_blocks(kName, device, kernel, threads, bytes));
    const int64_t runs = std::max<int64_t>(1, blocks / a.gate.streams);
    const int64_t run = (a.gate.tokens + runs - 1) / runs;
    cuda::launch(kName, device, stream, kernel,
                 dim3(cuda::blocks((a.gate.tokens + run - 1) / run * a.gate.streams)),
                 dim3(static_cast<unsigned>(threads)), bytes, a,
                 gate_scale<float>(a.gate.hidden), run, stages);
  });
}

}  // namespace ehc::engram
