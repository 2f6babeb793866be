// engram.layer_fwd with a convolution in one kernel, for bf16, four taps and d up to 7168 (sm_90).
//
//   H' = round(x + alpha*v + silu(c)), c[t] = sum_k W[k] * u[t - (3-k)*dilation]
//   u = (v * beta) * g, beta = alpha / sqrt(alpha^2 mean(v^2) + eps)
//   x, k, H' A[T,n,d]; v A[T,d]; weights W[n,d]; alpha, beta of a token and stream, as in the gate
//
// Bytes: (6n+2)d a token in 16-bit types, as the gate alone: x, k, v read once, H' written once;
// n-1 of n reads of v come from the caches. The 3*dilation tokens before a run are read again.
// Algorithm: a block takes a stream and a run of tokens, along the chains of tokens `dilation`
// apart (chain_walk.cuh), so that the sums of the taps to come stay in registers, as do the
// weights. Its warps have roles and wait for data alone, never for each other: one has the copy
// engine bring rows into a ring of stages in shared memory; most take columns, each of which adds
// its part to the sums of a token and then finishes one whose scalars are known; the others make
// alpha and beta of sums. Bits: those of the gate and the convolution as two kernels
// (layer_cuda.cu). Class R, for each thread adds the packs that are its own in gate_fwd;
// batch-invariant: no bit depends on the runs.
#include <string_view>

#include "backends/cuda/bulk_copy.cuh"
#include "core/forced_grid.h"
#include "ops/engram/shared/chain_walk.cuh"
#include "ops/engram/shared/chain_weights.cuh"
#include "ops/engram/shared/layer_rows.cuh"

namespace ehc::engram {

namespace {

using A = cuda::Bf16;
using cuda::PhaseBarrier;
using cuda::Turn;

constexpr int kColumns = kWidth<A>;
constexpr int kMostStages = 8;
constexpr int kColumnsOfWarp = cuda::kWarp * kColumns;
constexpr int kRowWarps = 14;  // that share a row, at most: d up to 7168

// The warps of a block: those that take columns, at most; those that make scalars; one that asks
// for rows. Sums are kLag tokens ahead of what needs their scalars. Weights stay in registers as
// floats or, kPacked, as they came.
template <int kColumnWarpCount, int kScalarWarpCount, int kTokens, bool kAsTheyCame>
struct BlockShape {
  static constexpr int kColumnWarps = kColumnWarpCount;
  static constexpr int kScalarWarps = kScalarWarpCount;
  static constexpr int kLag = kTokens;
  static constexpr bool kPacked = kAsTheyCame;
  static constexpr int kThreads = (kColumnWarps + kScalarWarps + 1) * cuda::kWarp;
};
using WideShape = BlockShape<8, 3, 2, false>;
using PackedShape = BlockShape<kRowWarps, 1, 1, true>;
// Of WideShape. Four warps change their number of registers together; twelve start with 168.
constexpr int kColumnRegisters = 216;
constexpr int kOtherRegisters = 72;

constexpr const char* kName = "engram.layer_fwd";

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
    const float sum = cuda::four_sums(of_lane);
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
  PackedChainWeights packed[kGatePacks] = {};
  WideChainWeights wide[kGatePacks] = {};
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
    const float sum = cuda::four_sums(sums.sum);
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
      const auto word = [&](int q) {
        const uint32_t sum = layer_word<A, kTwice>(alpha, v, x, c, q);
        return image ? x.word[q] : sum;
      };
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
        if constexpr (Shape::kPacked) y.word[q] = word(q);
      }
      if constexpr (!Shape::kPacked) {
        if (!writes) continue;
#pragma unroll
        for (int q = 0; q < kColumns / 2; ++q) y.word[q] = word(q);
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
  if (!cuda::kIsSm90) return;  // the kernel is empty elsewhere
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
  const Task task{
      a, ring, row_warps, blockIdx.x % streams, begin, min(a.gate.tokens, begin + run), scale};
  const int warp = static_cast<int>(threadIdx.x) / cuda::kWarp;
  if (warp >= Shape::kColumnWarps) {
    if constexpr (!Shape::kPacked) cuda::give_registers<kOtherRegisters>();
    if (warp == Shape::kColumnWarps + Shape::kScalarWarps) {
      bring_rows<Shape>(task);
    } else {
      make_scalars<Shape>(task, warp - Shape::kColumnWarps);
    }
  } else {
    if constexpr (!Shape::kPacked) cuda::take_registers<kColumnRegisters>();
    if (warp < row_warps) take_columns<Shape, kTwice>(task, warp);
  }
}

// Is it what the kernel was compiled for? On others it is empty, also where older code runs.
bool runs_on(int device) {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == 9 && cuda::can_overlap(device);
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
  return runs_on(device) ? "" : "the device or its code is not of compute capability 9";
}

void layer_fwd_sm90(const LayerForwardArgs& a, int device, void* stream) {
  if (a.gate.tokens == 0) return;
  const int row_warps = gate_threads(a.gate) / cuda::kWarp;
  const auto most = static_cast<int64_t>(most_shared(kName, device));
  int stages = kMostStages;
  while (Ring::bytes(stages, a.gate.hidden) > most) --stages;
  const auto bytes = static_cast<size_t>(Ring::bytes(stages, a.gate.hidden));
  const auto launch = [&](auto shape, auto kernel) {
    constexpr int kThreads = decltype(shape)::kThreads;
    const int64_t blocks = free_blocks(resident_blocks(kName, device, kernel, kThreads, bytes));
    const int64_t runs = std::max<int64_t>(1, blocks / a.gate.streams);
    const int64_t run = (a.gate.tokens + runs - 1) / runs;
    cuda::launch(kName, device, stream, kernel,
                 dim3(cuda::blocks((a.gate.tokens + run - 1) / run * a.gate.streams)),
                 dim3(kThreads), bytes, a, gate_scale<float>(a.gate.hidden), run, stages,
                 row_warps);
  };
  const auto with_shape = [&](auto shape) {
    using Shape = decltype(shape);
    if (a.round_twice) {
      launch(shape, &layer_chains<Shape, true>);
    } else {
      launch(shape, &layer_chains<Shape, false>);
    }
  };
  if (row_warps <= WideShape::kColumnWarps) {
    with_shape(WideShape{});
  } else {
    with_shape(PackedShape{});
  }
}

}  // namespace ehc::engram
