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
constexpr int kColumnsOfWarp = cuda::kWarp * kColumns;
constexpr int kRowWarps = 14;  // that share a row, at most: d up to 7168

// The warps of a block: those that take columns, at most; those that make scalars; one that asks for
// rows. Sums are kLag tokens ahead of what needs their scalars.
struct WideShape {
  static constexpr int kColumnWarps = 8;
  static constexpr int kScalarWarps = 3;
  static constexpr int kLag = 2;
  static constexpr bool kPacked = false;  // weights stay in registers as floats
  static constexpr int kThreads = (kColumnWarps + kScalarWarps + 1) * cuda::kWarp;
};
struct PackedShape {
  static constexpr int kColumnWarps = kRowWarps;
  static constexpr int kScalarWarps = 1;
  static constexpr int kLag = 1;
  static constexpr bool kPacked = true;
  static constexpr int kThreads = (kColumnWarps + kScalarWarps + 1) * cuda::kWarp;
};
// Of WideShape. Four warps change their number of registers together; twelve start with 168.
constexpr int kColumnRegisters = 216;
constexpr int kOtherRegisters = 72;

constexpr const char* kName = "engram.layer_fwd";

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

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

// How many tokens a run's walk has; by a whole warp.
__device__ int64_t chain_tokens(const LayerForwardArgs& a, int64_t begin, int64_t end) {
  const int64_t dilation = a.conv.dilation;
  int64_t count = 0;
  for (int64_t first = begin + threadIdx.x % cuda::kWarp; first < min(end, begin + dilation);
       first += cuda::kWarp) {
    SequenceCursor cursor(a.conv, a.gate.tokens, first);
    const int64_t before = (first - cursor.of(first).begin) / dilation;
    count += min(before, int64_t{kChainTaps - 1}) + (end - 1 - first) / dilation + 1;
  }
  for (int distance = cuda::kWarp / 2; distance > 0; distance /= 2) {
    count += __shfl_xor_sync(cuda::kAllLanes, count, distance);
  }
  return count;
}

// A stage of the ring, without its rows.
struct Stage {
  PhaseBarrier rows;  // x, k and v are there
  PhaseBarrier sums;  // every warp of the row has put its sums
  PhaseBarrier gate;  // alpha and beta are there
  ChainToken token;
  A* out;  // its row of H'
  float alpha, beta;
  float of_warp[GateSums::kCount][kRowWarps];
};

// Position in the ring.
struct Turn {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// Shared memory of a block.
struct Ring {
  Stage* stage;   // [stages]
  A* rows;        // [stages, 3, d]: x, k, v
  float* weight;  // [d], of the gate
  int stages;
  int hidden;

  __device__ __forceinline__ Ring(unsigned char* memory, int stage_count, int columns)
      : stage(reinterpret_cast<Stage*>(memory)), stages(stage_count), hidden(columns) {
    rows = reinterpret_cast<A*>(memory + bytes_of_stages(stage_count));
    weight = reinterpret_cast<float*>(rows + 3 * stage_count * columns);
  }
  __device__ __forceinline__ A* row(int s, int r) const { return rows + (s * 3 + r) * hidden; }
  __device__ __forceinline__ Pack pack(int s, int r, int at) const {
    return *reinterpret_cast<const Pack*>(row(s, r) + at);
  }
  __host__ __device__ static int bytes_of_stages(int stages) {
    return (stages * static_cast<int>(sizeof(Stage)) + 127) / 128 * 128;
  }
  static int64_t bytes(int stages, int64_t hidden) {
    return bytes_of_stages(stages) +
           hidden * (stages * 3 * int64_t{sizeof(A)} + int64_t{sizeof(float)});
  }
};

// Keeps a branch a branch, where the compiler would rather take both sides.
__device__ __forceinline__ void rarely() { asm volatile(""); }

// Of two sums over the lanes of a warp, as warp_sum of each: the upper half of the lanes has b.
__device__ __forceinline__ float halve(bool upper, float a, float b, int distance) {
  return (upper ? b : a) + __shfl_xor_sync(cuda::kAllLanes, upper ? a : b, distance);
}
// The same of four: lane l has number l / 8.
__device__ __forceinline__ float four_warp_sums(const float (&sum)[4]) {
  const bool upper = (threadIdx.x & 16) != 0;
  const float a = halve(upper, sum[0], sum[2], 16);
  const float b = halve(upper, sum[1], sum[3], 16);
  float x = halve((threadIdx.x & 8) != 0, a, b, 8);
#pragma unroll
  for (int distance = 4; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(cuda::kAllLanes, x, distance);
  }
  return x;
}

// Weights of a pack of columns, as they came.
struct PackedWeights {
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

// The same as floats, two columns at a time.
struct WideWeights {
  float tap[kChainTaps][kColumns];
  float norm[kColumns];

  __device__ __forceinline__ void widen(const PackedWeights& w, int q) {
#pragma unroll
    for (int i = 2 * q; i < 2 * q + 2; ++i) {
      norm[i] = column<A>(w.norms, i);
#pragma unroll
      for (int k = 0; k < kChainTaps; ++k) {
        tap[k][i] = column<A>(w.taps[q], i % 2 * kChainTaps + k);
      }
    }
  }
};

// What a block does.
struct Task {
  const LayerForwardArgs& a;
  const Ring& ring;
  int row_warps;  // that take columns
  int64_t stream, begin, end;
  float scale;  // gate_scale
};

// The warp that asks for rows, a lane for each of a token.
template <class Shape>
__device__ __forceinline__ void bring_rows(const Task& task) {
  constexpr int kRows = 3;
  const GateForwardArgs& gate = task.a.gate;
  const Ring& ring = task.ring;
  const int lane = static_cast<int>(threadIdx.x) % cuda::kWarp;
  const unsigned bytes = static_cast<unsigned>(ring.hidden) * sizeof(A);
  const A* from = lane == 0   ? residual_row<A>(gate, 0, task.stream)
                  : lane == 1 ? key_row<A>(gate, 0, task.stream)
                              : value_row<A>(gate, 0);
  const int64_t stride = lane == 0   ? gate.residual_token_stride
                         : lane == 1 ? gate.key_token_stride
                                     : gate.value_token_stride;
  ChainWalk walk(task.a, task.begin, task.end);
  const auto ask = [&](int s) {
    const ChainToken token = walk.next();
    Stage& stage = ring.stage[s];
    if (lane == 0) {
      stage.token = token;
      stage.out = out_row<A>(gate, token.token, task.stream);
      stage.rows.arrive_expecting(token.image ? bytes : kRows * bytes);
    }
    __syncwarp();
    if (lane < (token.image ? 1 : kRows)) {
      cuda::copy_row(ring.row(s, lane), from + token.token * stride, bytes, stage.rows);
    }
  };
  for (int s = 0; s < ring.stages && !walk.ended(); ++s) ask(s);
  Turn turn;
  // Once all warps have put the sums of a token they have left the one kLag + 1 before it.
  int left = -1 - Shape::kLag;
  for (; !walk.ended(); ++left) {
    ring.stage[turn.stage].sums.wait(turn.parity);
    if (left == ring.stages) left = 0;
    if (left >= 0) ask(left);
    turn.advance(ring.stages);
  }
}

// One of the warps that make scalars of sums, in turns.
template <class Shape>
__device__ __forceinline__ void make_scalars(const Task& task, int number) {
  const LayerForwardArgs& a = task.a;
  const Ring& ring = task.ring;
  const int lane = static_cast<int>(threadIdx.x) % cuda::kWarp;
  const int64_t tokens = chain_tokens(a, task.begin, task.end);
  Turn turn;
  for (int64_t i = 0; i < tokens; ++i, turn.advance(ring.stages)) {
    if (i % Shape::kScalarWarps != number) continue;
    Stage& stage = ring.stage[turn.stage];
    stage.sums.wait(turn.parity);
    float of_lane[GateSums::kCount];
#pragma unroll
    for (int k = 0; k < GateSums::kCount; ++k) {
      of_lane[k] = lane < task.row_warps ? stage.of_warp[k][lane] : 0.0f;
    }
    const float sum = four_warp_sums(of_lane);
    // Every lane makes of its sum what any of the four may be needed for: roots and quotients are
    // slow.
    const float mean = sum / static_cast<float>(a.gate.hidden);
    const float rstd = reciprocal_rms(sum, a.gate.hidden, a.gate.eps);
    const auto of = [](float x, int k) {
      return __shfl_sync(cuda::kAllLanes, x, k * (cuda::kWarp / GateSums::kCount));
    };
    GateScalars scalars =
        gate_scalars_of_norms(of(rstd, 0), of(rstd, 1), of(sum, 2), a.gate, task.scale);
    const float beta = conv_beta(scalars.alpha, of(mean, 3), a.conv.eps);
    if (lane != 0) continue;
    const ChainToken token = stage.token;
    if (token.image) scalars = {};
    stage.alpha = scalars.alpha;
    stage.beta = beta;
    stage.gate.arrive();
    if (token.writes) save(a.gate, token.token, task.stream, scalars);
  }
}

// A warp that takes columns: number `warp` of the block.
template <class Shape, bool kTwice>
__device__ __forceinline__ void take_columns(const Task& task, int warp) {
  const Ring& ring = task.ring;
  const int lane = static_cast<int>(threadIdx.x) % cuda::kWarp;
  const int first = static_cast<int>(threadIdx.x) * kColumns;
  const int step = task.row_warps * kColumnsOfWarp;
  PackedWeights packed[kGatePacks] = {};
  WideWeights wide[kGatePacks] = {};
  ConvChain<kColumns> chain[kGatePacks];
#pragma unroll
  for (int p = 0; p < kGatePacks; ++p) {
    chain[p].clear();
    const int at = first + p * step;
    if (at >= ring.hidden) continue;
    packed[p].load(task.a.conv, task.stream, at);
    if constexpr (!Shape::kPacked) {
#pragma unroll
      for (int q = 0; q < kChainTaps; ++q) wide[p].widen(packed[p], q);
    }
    const auto pack_of = [&](const StreamWeight& w) {
      return cuda::load_pack<true>(
          static_cast<const A*>(w.data) + task.stream * w.stream_stride + at, kColumns);
    };
    const Pack of_hidden = pack_of(task.a.hidden_weight);
    const Pack of_embed = pack_of(task.a.embed_weight);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      ring.weight[at + i] = column<A>(of_hidden, i) * column<A>(of_embed, i);
    }
  }

  const auto put_sums = [&](int s) {
    Stage& stage = ring.stage[s];
    GateSums sums;
#pragma unroll
    for (int p = 0; p < kGatePacks; ++p) {
      const int at = first + p * step;
      if (at >= ring.hidden) continue;
      float weight[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(ring.weight + at + i);
        weight[i] = four.x, weight[i + 1] = four.y, weight[i + 2] = four.z, weight[i + 3] = four.w;
      }
      sums.add<A>(ring.pack(s, 0, at), ring.pack(s, 1, at), weight);
      sums.add_value<A>(ring.pack(s, 2, at));
    }
    const float sum = four_warp_sums(sums.sum);
    if (lane % 8 == 0) stage.of_warp[lane / 8][warp] = sum;
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
    for (int p = 0; p < kGatePacks; ++p) {
      const int at = first + p * step;
      if (at >= ring.hidden) continue;
      const Pack x = ring.pack(s, 0, at);
      const Pack v = ring.pack(s, 2, at);
      float c[kColumns];
      Pack y;
#pragma unroll
      for (int q = 0; q < kColumns / 2; ++q) {
        if constexpr (Shape::kPacked) {
          // Not widened before their turn: there are no registers for it.
          keep_packed(packed[p].taps[q]);
          asm volatile("" : "+r"(packed[p].norms.word[q]));
          wide[p].widen(packed[p], q);
        }
#pragma unroll
        for (int i = 2 * q; i < 2 * q + 2; ++i) {
          const float u = conv_normalised(column<A>(v, i), beta, wide[p].norm[i]);
          c[i] = chain[p].step(i, image ? 0.0f : u, wide[p].tap);
        }
        const uint32_t word = layer_word<A, kTwice>(alpha, v, x, c, q);
        y.word[q] = image ? x.word[q] : word;
      }
      if (writes) cuda::store_pack<true>(out + p * step, y, kColumns);
    }
  };

  Turn ahead, behind;
  bool more = true;
  for (int between = 0;; --between) {
    for (; more && between <= Shape::kLag; ++between) {
      ring.stage[ahead.stage].rows.wait(ahead.parity);
      put_sums(ahead.stage);
      more = !ring.stage[ahead.stage].token.last;
      ahead.advance(ring.stages);
    }
    ring.stage[behind.stage].gate.wait(behind.parity);
    const bool last = ring.stage[behind.stage].token.last;
    finish(behind.stage);
    if (last) return;
    behind.advance(ring.stages);
  }
}

// Block b takes run b / n of stream b % n.
template <class Shape, bool kTwice>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    layer_chains(const __grid_constant__ LayerForwardArgs a, float scale, int64_t run, int stages,
                 int row_warps) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  extern __shared__ __align__(128) unsigned char memory[];
  const Ring ring(memory, stages, static_cast<int>(a.gate.hidden));
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      ring.stage[s].rows.init(1);
      ring.stage[s].sums.init(row_warps);
      ring.stage[s].gate.init(1);
    }
    cuda::publish_barriers();
  }
  __syncthreads();
  const auto streams = static_cast<unsigned>(a.gate.streams);
  const int64_t begin = blockIdx.x / streams * run;
  const Task task{a,     ring, row_warps, blockIdx.x % streams,
                  begin, min(a.gate.tokens, begin + run), scale};
  const int warp = static_cast<int>(threadIdx.x) / cuda::kWarp;
  if (warp >= Shape::kColumnWarps) {
    if constexpr (!Shape::kPacked) give_registers<kOtherRegisters>();
    if (warp == Shape::kColumnWarps + Shape::kScalarWarps) {
      bring_rows<Shape>(task);
    } else {
      make_scalars<Shape>(task, warp - Shape::kColumnWarps);
    }
  } else {
    if constexpr (!Shape::kPacked) take_registers<kColumnRegisters>();
    if (warp < row_warps) take_columns<Shape, kTwice>(task, warp);
  }
#endif
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
  if (gate.hidden > int64_t{kRowWarps} * kColumnsOfWarp * kGatePacks) return "d is above 7168";
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
  const int row_warps = gate_threads(a.gate) / cuda::kWarp;
  const auto most = static_cast<int64_t>(most_shared(kName, device));
  int stages = kMostStages;
  if (const char* e = getenv("LAYER_STAGES")) stages = atoi(e);
  while (Ring::bytes(stages, a.gate.hidden) > most) --stages;
  const auto bytes = static_cast<size_t>(Ring::bytes(stages, a.gate.hidden));
  const auto launch = [&](auto shape, auto kernel) {
    constexpr int kThreads = decltype(shape)::kThreads;
    const int64_t blocks = free_blocks(resident_blocks(kName, device, kernel, kThreads, bytes));
    const int64_t runs = std::max<int64_t>(1, blocks / a.gate.streams);
    const int64_t run = (a.gate.tokens + runs - 1) / runs;
    cuda::launch(kName, device, stream, kernel,
                 dim3(cuda::blocks((a.gate.tokens + run - 1) / run * a.gate.streams)),
                 dim3(kThreads), bytes, a, gate_scale<float>(a.gate.hidden), run, stages, row_warps);
  };
  const auto with_shape = [&](auto shape) {
    using Shape = decltype(shape);
    if (a.round_twice) {
      launch(shape, &layer_chains<Shape, true>);
    } else {
      launch(shape, &layer_chains<Shape, false>);
    }
  };
  if (row_warps <= WideShape::kColumnWarps && !getenv("LAYER_PACKED")) {
    with_shape(WideShape{});
  } else {
    with_shape(PackedShape{});
  }
}

}  // namespace ehc::engram
