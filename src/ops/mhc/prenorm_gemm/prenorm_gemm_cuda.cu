// mhc.prenorm_gemm on CUDA (sm_80+), on tensor cores.
//
//   mul[s,t,g,j] = sum of x[t,k] fn[j,k], sqr[s,t,g] = sum of x[t,k]^2, over columns k in (s, g)
//   x A[T,n,d] as [T,K], fn F32[M,K]; mul F32[S,T,G,M], sqr F32[S,T,G]
//
// Bytes: x once, 6*M*K for 256 tokens (from L2), 4*S*G*(M+1) written a token; 10*M*K to prepare.
// Algorithm: fn is first cut into three bf16 parts, which are laid out as lanes want them. A warp
// takes 16 tokens and 24 mixes; tokens are the columns of
// the tensor cores' tiles, so that 16 bytes of a row are operands of two steps. x, for each warp
// alone, and the parts, for all warps of the block, are copied into shared memory some blocks of 64
// columns ahead. Where the splits alone leave processors idle, a split is cut further; those sums
// go to the workspace and a second kernel adds them.
// Accuracy: tensor cores cut off what they add, so products of first parts are summed over 64
// columns at a time and then added in fp32. The others, which are 2^8 smaller, go on over a chunk
// of 512 columns. An infinity makes them NaN: then the sum of the first parts is the answer.
//
// Class B: chunks are added in the tree of pairwise_sum, of which every block makes a whole node;
// so no bit depends on how splits are cut, nor on a token's neighbours.
#include <algorithm>

#include "backends/cuda/large_shared.cuh"
#include "core/float_formats.h"
#include "core/forced_grid.h"
#include "core/workspace.h"
#include "ops/mhc/shared/prenorm_block.cuh"
#include "ops/mhc/shared/token_steps.cuh"

namespace ehc::mhc {

using namespace prenorm;

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kMostStages = 4;  // blocks of columns in shared memory, 2 at least

// --- how a call is cut ---

// Calls body(a, tiles): the storage type, and of how many tiles of tokens a warp has the sums. Many
// share what it reads of fn, but take registers, as parts of streams do, and leave processors idle
// where tokens are few. Every token has its own sums, so no bit depends on it.
template <class Body>
void with_tiles(const PrenormGemmArgs& a, const Body& body) {
  constexpr int64_t kFewTokens = 512;
  cuda::with_activation(a.sizes.activation, [&](auto activation) {
    if constexpr (kPartsOf<decltype(activation)> == 1) {
      if (a.sizes.tokens > kFewTokens) return body(activation, std::integral_constant<int, 4>{});
    }
    body(activation, std::integral_constant<int, 2>{});
  });
}

struct Cut {
  int64_t octets;      // of mixes that a block makes, 1 or 3
  int64_t mix_groups;  // of so many
  int64_t token_blocks;
  int64_t column_blocks;  // of 64
  int64_t nodes, chunks;  // a split is cut into `nodes` of `chunks` chunks each
  bool whole;             // see Streams
};

Cut cut_call(const PrenormGemmArgs& a) {
  const int64_t columns = a.sizes.streams * a.sizes.hidden;
  Cut cut{};
  cut.octets = a.mixes <= kOctet ? 1 : 3;
  cut.mix_groups = (a.mixes + cut.octets * kOctet - 1) / (cut.octets * kOctet);
  cut.column_blocks = (columns + kBlockColumns - 1) / kBlockColumns;
  const bool is_flat = a.residual.stream_stride == a.sizes.hidden || a.sizes.streams == 1;
  cut.whole =
      is_flat && are_vectors(a.sizes, a.residual) && columns / a.groups % kBlockColumns == 0;
  with_tiles(a, [&](auto, auto tiles) {
    constexpr int64_t kTokens = kWarps * tiles() * kOctet;
    cut.token_blocks = (a.sizes.tokens + kTokens - 1) / kTokens;
  });
  // Split 0 is the longest one.
  const Columns longest = columns_of_split(a, 0);
  const int64_t chunks = chunks_of_columns(longest.end - longest.begin);
  const int64_t leaves = power_of_two_from(chunks);
  const int64_t others = cut.token_blocks * cut.mix_groups * a.splits * a.groups;
  // Measured on an H200, in thousandths of what a chunk takes: a block begins and ends, and the
  // sums of a node are written and added.
  constexpr int64_t kChunk = 1000;
  constexpr int64_t kBlock = 150;
  constexpr int64_t kTokensOfSum = 280;
  const int64_t processors = free_blocks(132);
  int64_t least = INT64_MAX;
  for (int64_t nodes = std::max<int64_t>(1, leaves / kMostChunks); nodes <= leaves; nodes *= 2) {
    const int64_t of_node = leaves / nodes;
    const int64_t blocks = (chunks + of_node - 1) / of_node * others;  // that have work
    const int64_t rounds = (blocks + processors - 1) / processors;
    const int64_t sums = nodes == 1 ? 0 : a.sizes.tokens * nodes / kTokensOfSum;
    const int64_t cost = rounds * (of_node * kChunk + kBlock) + sums;
    if (cost >= least) continue;
    least = cost;
    cut.nodes = nodes;
    cut.chunks = of_node;
  }
  return cut;
}

int64_t packs_of_fn(const Cut& cut) {
  return cut.mix_groups * cut.column_blocks * (cut.octets == 1 ? kBlockPacks<1> : kBlockPacks<3>);
}
// Sums of nodes: F32[nodes,S,T,G,M+1].
int64_t floats_of_nodes(const PrenormGemmArgs& a, const Cut& cut) {
  if (cut.nodes == 1) return 0;
  return cut.nodes * a.splits * a.sizes.tokens * a.groups * (a.mixes + 1);
}

// Where sums of nodes go: to the outputs if there is one node.
struct Sums {
  GroupRows mul, sqr;
  int64_t node_stride;
};

// --- fn in parts ---

// A pack of [groups, blocks] times that of kBlockPacks. Mixes and columns that do not exist are
// zeros.
template <int kOctets>
struct Prepare {
  PrenormGemmArgs a;
  int64_t blocks;
  Pack* to;

  __device__ void operator()(int64_t i) const {
    const int lane = static_cast<int>(i % 32);
    const int tile = static_cast<int>(i / 32 % kFnTiles<kOctets>);
    const int step = static_cast<int>(i / (32 * kFnTiles<kOctets>) % kSteps);
    const int64_t of_group = i / kBlockPacks<kOctets>;
    const int64_t columns = a.sizes.streams * a.sizes.hidden;
    const int64_t first =
        of_group % blocks * kBlockColumns + step / 2 * 32 + lane % 4 * 8 + step % 2 * 4;
    Pack pack{};
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const HalfTile half = half_tile<kOctets>(tile, upper);
      const int64_t mix = (of_group / blocks * kOctets + half.octet) * kOctet + lane / 4;
      if (half.octet < 0 || mix >= a.mixes) continue;
      uint32_t part[4] = {};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (first + k >= columns) continue;
        const float fn = __ldg(a.fn.data + mix * a.fn.stride + first + k);
        uint32_t parts[kParts];
        cuda::parts_of(a.tf32 ? round_to_tf32(fn) : fn, parts);
        part[k] = half.part == 0 ? parts[0] : half.part == 1 ? parts[1] : parts[2];
      }
      pack.word[upper] = cuda::side_by_side(part[0], part[1]);
      pack.word[2 + upper] = cuda::side_by_side(part[2], part[3]);
    }
    to[i] = pack;
  }
};

// --- the kernel ---

template <int kOctets, int kTiles>
__device__ __forceinline__ void store_sums(const PrenormGemmArgs& a, const Sums& to,
                                           const Accumulator<kOctets, kTiles>& sums, int64_t token,
                                           int64_t mix, int64_t split, int64_t group, int64_t node,
                                           int lane) {
  const auto at = [&](const GroupRows& rows, int64_t t) {
    return rows.data + node * to.node_stride + split * rows.split_stride + t * rows.token_stride +
           group * rows.group_stride;
  };
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const float square = sums.square[i];
    const int64_t t = token + i * kOctet + lane / 4;
    if (mix == 0 && lane % 4 == 0 && t < a.sizes.tokens) *at(to.sqr, t) = square;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int64_t of_column = token + i * kOctet + lane % 4 * 2 + c;
      if (of_column >= a.sizes.tokens) continue;
      float* mul = at(to.mul, of_column) + mix;
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        const int j = o * kOctet + lane / 4;
        if (mix + j < a.mixes) mul[j] = sums.first[i][o][c];
      }
    }
  }
}

// Packs of a stage: of fn, and of the streams of all warps.
template <class A, int kTiles, bool kWhole, int kOctets>
inline constexpr int kStagePacks = kBlockPacks<kOctets> +
                                   (kWhole ? kWarps * StreamStage<A, kTiles>::kPacks : 0);

template <class A, int kTiles, bool kWhole, int kOctets>
__global__ void __launch_bounds__(kThreads, 1)
    prenorm_gemm(const __grid_constant__ PrenormGemmArgs a, const __grid_constant__ Cut cut,
                 const __grid_constant__ Sums to, const Pack* fn, int stages) {
  constexpr int kFnPacks = kBlockPacks<kOctets>;
  using Stage = StreamStage<A, kTiles>;
  constexpr int kStreamPacks = kWarps * Stage::kPacks;
  extern __shared__ float4 shared[];
  Pack* of_fn = reinterpret_cast<Pack*>(shared);  // [stages, kFnPacks]
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  Pack* of_streams = of_fn + stages * kFnPacks + warp * Stage::kPacks;  // [stages, warps, kPacks]
  int64_t index = blockIdx.x;
  const auto next_part = [&](int64_t count) {
    const int64_t part = index % count;
    index /= count;
    return part;
  };
  const int64_t token = (next_part(cut.token_blocks) * kWarps + warp) * (kTiles * kOctet);
  const int64_t mix_group = next_part(cut.mix_groups);
  const int64_t node = next_part(cut.nodes);
  const int64_t group = next_part(a.groups);
  const int64_t split = index;

  // Chunks count from the start of the split.
  const Columns of_split = columns_of_split(a, split);
  const int64_t width = a.sizes.streams * a.sizes.hidden / a.groups;
  const int64_t origin = of_split.begin + node * cut.chunks * kChunkColumns;
  const int64_t begin = max(origin, group * width);
  const int64_t end =
      min(min(of_split.end, origin + cut.chunks * kChunkColumns), (group + 1) * width);
  const int64_t first_block = begin / kBlockColumns;
  const int blocks =
      end > begin ? static_cast<int>((end + kBlockColumns - 1) / kBlockColumns - first_block) : 0;
  const Pack* from = fn + (mix_group * cut.column_blocks + first_block) * kFnPacks;

  const bool works = token < a.sizes.tokens;
  using Streams = std::conditional_t<kWhole, WholeStreams<A, kTiles>, AnyStreams<A, kTiles>>;
  const Streams streams(a, token, lane);
  const auto fetch = [&](int block, int slot) {
    if (block < blocks) {
      const Pack* of_block = from + static_cast<int64_t>(block) * kFnPacks;
#pragma unroll
      for (int i = 0; i < (kFnPacks + kThreads - 1) / kThreads; ++i) {
        const int at = i * kThreads + static_cast<int>(threadIdx.x);
        if (at < kFnPacks) cuda::start_copy(of_fn + slot * kFnPacks + at, of_block + at);
      }
      if constexpr (kWhole) {
        if (works) {
          streams.copy((first_block + block) * kBlockColumns, of_streams + slot * kStreamPacks);
        }
      }
    }
    cuda::commit_copies();
  };
  for (int block = 0; block < stages - 1; ++block) fetch(block, block);

  using WarpSums = Accumulator<kOctets, kTiles>;
  WarpSums sums;
  ChunkTree<WarpSums::kCount> tree;
  sums.clear();
  int slot = 0;
  for (int block = 0; block < blocks; ++block, slot = slot + 1 == stages ? 0 : slot + 1) {
    cuda::wait_for_buffer(stages);
    __syncthreads();  // the block is there, and the one before it used up
    fetch(block + stages - 1, slot == 0 ? stages - 1 : slot - 1);
    if (!works) continue;
    const int64_t first = (first_block + block) * kBlockColumns;
    BlockOfStreams<A, kTiles> x;
    if constexpr (kWhole) {
      streams.load(of_streams + slot * kStreamPacks, x);
    } else {
      streams.load(first, begin, end, x);
    }
    multiply_block<A, kWhole>(x, of_fn + slot * kFnPacks, lane, first, begin, end, sums);
    const auto done = static_cast<uint32_t>(first - origin) + kBlockColumns;
    if (done % kChunkColumns != 0 && block + 1 < blocks) continue;
    sums.add_rest();
    tree.push(static_cast<int>((done - kBlockColumns) / kChunkColumns), sums);
    sums.clear();
  }
  if (!works) return;
  tree.finish(sums);
  store_sums(a, to, sums, token, mix_group * kOctets * kOctet, split, group, node, lane);
}

// The sums of nodes added up; kNodes: how many, so that all are on their way at once, or 0.
template <int kNodes>
struct AddNodes {
  PrenormGemmArgs a;
  int64_t nodes;
  const float* sums;

  __device__ void operator()(int64_t i) const {
    const int64_t of_group = a.mixes + 1;
    const int64_t j = i % of_group;
    const int64_t group = i / of_group % a.groups;
    const int64_t t = i / of_group / a.groups % a.sizes.tokens;
    const int64_t split = i / of_group / a.groups / a.sizes.tokens;
    const int64_t stride = a.splits * a.sizes.tokens * a.groups * of_group;
    const auto load = [&](int64_t node) { return __ldg(sums + node * stride + i); };
    float sum = 0;
    if constexpr (kNodes > 0) {
      sum = balanced_sum<kNodes>(load);
    } else {
      sum = pairwise_sum(nodes, 0.0f, load);
    }
    const GroupRows& rows = j < a.mixes ? a.mul_partial : a.sqr_partial;
    rows.data[split * rows.split_stride + t * rows.token_stride + group * rows.group_stride +
              (j < a.mixes ? j : 0)] = sum;
  }
};

constexpr const char* kName = "mhc.prenorm_gemm";

}  // namespace

size_t prenorm_gemm_cuda_workspace(const PrenormGemmArgs& a) {
  if (a.sizes.tokens == 0) return 0;
  const Cut cut = cut_call(a);
  Workspace arrays(nullptr);
  arrays.take<Pack>(packs_of_fn(cut));
  arrays.take<float>(floats_of_nodes(a, cut));
  return arrays.bytes();
}

void prenorm_gemm_cuda(const PrenormGemmArgs& a, void* workspace, int device, void* stream) {
  if (a.sizes.tokens == 0) return;
  const Cut cut = cut_call(a);
  Workspace arrays(workspace);
  Pack* fn = arrays.take<Pack>(packs_of_fn(cut));
  float* nodes = arrays.take<float>(floats_of_nodes(a, cut));
  const auto prepare = [&](const auto& work) {
    cuda::launch_each(kName, device, stream, packs_of_fn(cut), work);
  };
  if (cut.octets == 1) {
    prepare(Prepare<1>{a, cut.column_blocks, fn});
  } else {
    prepare(Prepare<3>{a, cut.column_blocks, fn});
  }
  Sums to = {a.mul_partial, a.sqr_partial, 0};
  if (cut.nodes > 1) {
    const int64_t of_group = a.mixes + 1;
    const int64_t of_token = a.groups * of_group;
    to.mul = {nodes, a.sizes.tokens * of_token, of_token, of_group};
    to.sqr = to.mul;
    to.sqr.data += a.mixes;
    to.node_stride = a.splits * a.sizes.tokens * of_token;
  }
  const dim3 grid(
      cuda::blocks(cut.token_blocks * cut.mix_groups * cut.nodes * a.groups * a.splits));
  with_tiles(a, [&](auto activation, auto tiles) {
    using A = decltype(activation);
    const auto start = [&](auto whole, auto octets) {
      constexpr size_t kStage = kStagePacks<A, tiles(), whole(), octets()> * sizeof(Pack);
      const auto fit = static_cast<int>(cuda::most_shared_bytes(kName, device) / kStage);
      const int stages = std::clamp(fit, 2, kMostStages);
      cuda::launch_large(kName, device, stream, &prenorm_gemm<A, tiles(), whole(), octets()>, grid,
                         dim3(kThreads), kStage * static_cast<size_t>(stages), a, cut, to, fn,
                         stages);
    };
    const auto with_octets = [&](auto whole) {
      cut.octets == 1 ? start(whole, std::integral_constant<int, 1>{})
                      : start(whole, std::integral_constant<int, 3>{});
    };
    cut.whole ? with_octets(std::true_type{}) : with_octets(std::false_type{});
  });
  const auto add = [&](auto count) {
    cuda::launch_each(kName, device, stream, a.splits * a.sizes.tokens * a.groups * (a.mixes + 1),
                      AddNodes<count()>{a, cut.nodes, nodes});
  };
  switch (cut.nodes) {
    case 1:
      return;
    case 2:
      return add(std::integral_constant<int, 2>{});
    case 4:
      return add(std::integral_constant<int, 4>{});
    case 8:
      return add(std::integral_constant<int, 8>{});
    case 16:
      return add(std::integral_constant<int, 16>{});
    case 32:
      return add(std::integral_constant<int, 32>{});
    case 64:
      return add(std::integral_constant<int, 64>{});
    default:
      return add(std::integral_constant<int, 0>{});
  }
}

}  // namespace ehc::mhc
