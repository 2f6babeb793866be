// mhc.prenorm_gemm on CUDA (sm_80+), on tensor cores.
//
//   mul[s,t,g,j] = sum of x[t,k] fn[j,k], sqr[s,t,g] = sum of x[t,k]^2, over columns k in (s, g)
//   x A[T,n,d] as [T,K], fn F32[M,K]; mul F32[S,T,G,M], sqr F32[S,T,G]
//
// Bytes: x once, 6*M*K for 256 tokens (from L2), 4*S*G*(M+1) written a token; 10*M*K to prepare.
// Algorithm: fn is first cut into three bf16 parts, which are laid out as lanes want them. A warp
// takes 32 tokens (16 of F16 and F32, which have parts too) and 24 mixes; it reads x straight into
// registers, a block of 64 columns ahead of the product. The parts come through shared memory for
// all warps of the block. Where the splits alone leave processors idle, a split is cut further;
// those sums go to the workspace and a second kernel adds them.
// Accuracy: tensor cores cut off what they add, so products of first parts are summed over 64
// columns at a time and then added in fp32. The others, which are 2^8 smaller, go on over a chunk
// of 512 columns. An infinity makes them NaN: then the sum of the first parts is the answer.
// Class B: chunks are added in the tree of pairwise_sum, of which every block makes a whole node;
// so no bit depends on how splits are cut, nor on a token's neighbours.
#include <algorithm>

#include "core/float_formats.h"
#include "core/workspace.h"
#include "ops/mhc/shared/pairwise_sum.h"
#include "ops/mhc/shared/prenorm_block.cuh"

namespace ehc::mhc {

using namespace prenorm;

namespace {

constexpr int kThreads = 256;
constexpr int kStages = 4;  // blocks of parts in shared memory

// --- how a call is cut ---

struct Cut {
  int64_t tiles;       // of mixes that a block makes, 1 or 3
  int64_t mix_groups;  // of so many
  int64_t token_blocks;
  int64_t column_blocks;  // of 64
  int64_t nodes, chunks;  // a split is cut into `nodes` of `chunks` chunks each
  bool whole;             // all blocks of columns are, and rows move 16 bytes at a time
};

Cut cut_call(const PrenormGemmArgs& a) {
  constexpr int64_t kProcessors = 128;
  const int64_t columns = a.sizes.streams * a.sizes.hidden;
  Cut cut{};
  cut.tiles = a.mixes <= kMixTile ? 1 : 3;
  cut.mix_groups = (a.mixes + cut.tiles * kMixTile - 1) / (cut.tiles * kMixTile);
  cut.column_blocks = (columns + kBlockColumns - 1) / kBlockColumns;
  const auto width = 16 / static_cast<int64_t>(size_of(a.sizes.activation));
  cut.whole = are_vectors(a.sizes, a.residual) && columns / a.groups % kBlockColumns == 0 &&
              a.sizes.hidden % width == 0;
  const int64_t most_tokens = kThreads / 2 * (a.sizes.activation == DType::bf16 ? 2 : 1);
  const int64_t tokens = cut.whole ? most_tokens : kThreads / 2;
  cut.token_blocks = (a.sizes.tokens + tokens - 1) / tokens;
  // Split 0 is the longest one.
  const Columns longest = columns_of_split(a, 0);
  const int64_t leaves = power_of_two_from(chunks_of_columns(longest.end - longest.begin));
  // The workspace must not depend on alignment, so neither do nodes.
  const int64_t token_blocks = (a.sizes.tokens + most_tokens - 1) / most_tokens;
  const int64_t others = token_blocks * cut.mix_groups * a.splits * a.groups;
  cut.nodes = std::max<int64_t>(1, leaves / kMostChunks);
  while (2 * cut.nodes <= leaves && 2 * cut.nodes * others <= kProcessors) cut.nodes *= 2;
  cut.chunks = leaves / cut.nodes;
  return cut;
}

int64_t packs_of_parts(const Cut& cut) {
  return cut.mix_groups * cut.column_blocks * cut.tiles * kTilePacks;
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

// Eight columns of a mix: [groups, blocks, tiles, halves, parts, lanes] packs, where lane l of a
// tile has mix l/4 and columns 8(l%4) of a half. Mixes and columns that do not exist are zeros.
struct Prepare {
  PrenormGemmArgs a;
  int64_t tiles, blocks;
  Pack* to;

  __device__ void operator()(int64_t i) const {
    const int lane = static_cast<int>(i % 32);
    const int64_t half = i / 32 % kHalves;
    const int64_t tile = i / (32 * kHalves) % tiles;
    const int64_t of_group = i / (32 * kHalves) / tiles;
    const int64_t mix = (of_group / blocks * tiles + tile) * kMixTile + lane / 4;
    const int64_t first = of_group % blocks * kBlockColumns + half * 32 + lane % 4 * 8;
    const int64_t columns = a.sizes.streams * a.sizes.hidden;
    uint32_t part[8][kParts] = {};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (mix >= a.mixes || first + k >= columns) continue;
      const float fn = __ldg(a.fn.data + mix * a.fn.stride + first + k);
      cuda::parts_of(a.tf32 ? round_to_tf32(fn) : fn, part[k]);
    }
    Pack* out = to + i / (32 * kHalves) * kTilePacks + half * kParts * 32 + lane;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      Pack pack;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        pack.word[w] = cuda::side_by_side(part[2 * w][p], part[2 * w + 1][p]);
      }
      out[p * 32] = pack;
    }
  }
};

// --- the kernel ---

template <class A, int kRows, int kTiles>
__device__ __forceinline__ void store_sums(const PrenormGemmArgs& a, const Sums& to,
                                           Accumulator<kRows, kTiles>& sums, int64_t token,
                                           int64_t mix, int64_t split, int64_t group, int64_t node,
                                           int lane) {
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float square = sums.square[m][r];
      square += __shfl_xor_sync(0xffffffffU, square, 1);
      square += __shfl_xor_sync(0xffffffffU, square, 2);
      const int64_t t = token + (m * 2 + r) * 8 + lane / 4;
      if (t >= a.sizes.tokens) continue;
      const auto at = [&](const GroupRows& rows) {
        return rows.data + node * to.node_stride + split * rows.split_stride +
               t * rows.token_stride + group * rows.group_stride;
      };
      if (mix == 0 && lane % 4 == 0) *at(to.sqr) = square;
      float* mul = at(to.mul) + mix;
#pragma unroll
      for (int i = 0; i < kTiles * 2; ++i) {
        const int j = i / 2 * kMixTile + lane % 4 * 2 + i % 2;
        if (mix + j < a.mixes) mul[j] = sums.first[m][i / 2][r * 2 + i % 2];
      }
    }
  }
}

template <class A, bool kWhole, int kTiles>
__global__ void __launch_bounds__(kThreads, 1)
    prenorm_gemm(const __grid_constant__ PrenormGemmArgs a, const __grid_constant__ Cut cut,
                 const __grid_constant__ Sums to, const Pack* parts) {
  constexpr int kRows = kRowTiles<A, kWhole>;
  constexpr int kPacks = kTiles * kTilePacks;
  constexpr int kAhead = kWhole ? 2 : 1;  // blocks of streams in registers
  __shared__ Pack stage[kStages][kPacks];
  const int lane = threadIdx.x % 32;
  int64_t index = blockIdx.x;
  const auto next_part = [&](int64_t count) {
    const int64_t part = index % count;
    index /= count;
    return part;
  };
  const int64_t token =
      (next_part(cut.token_blocks) * (kThreads / 32) + threadIdx.x / 32) * (kRows * 16);
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
  const int64_t blocks = end > begin ? (end + kBlockColumns - 1) / kBlockColumns - first_block : 0;
  const Pack* from = parts + (mix_group * cut.column_blocks + first_block) * kPacks;

  const auto fetch = [&](int64_t block) {
    if (block < blocks) {
      for (int i = threadIdx.x; i < kPacks; i += kThreads) {
        cuda::copy_async(&stage[block % kStages][i], from + block * kPacks + i);
      }
    }
    cuda::end_of_copies();
  };
  for (int block = 0; block < kStages - 1; ++block) fetch(block);

  const bool works = token < a.sizes.tokens;
  const Streams<A, kWhole, kRows> rows(a, token, lane);
  BlockOfStreams<A, kRows> streams[kAhead];
  const auto load = [&](int64_t block, BlockOfStreams<A, kRows>& x) {
    if (works && block < blocks) rows.load((first_block + block) * kBlockColumns, begin, end, x);
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(i, streams[i]);
  Accumulator<kRows, kTiles> sums;
  ChunkTree<kRows*(kTiles * 4 + 2)> tree;
  sums.clear();
  for (int64_t b = 0; b < blocks; b += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t block = b + i;
      if (block >= blocks) break;
      cuda::wait_for_copies<kStages - 2>();
      __syncthreads();  // the block is there, and the one before it used up
      fetch(block + kStages - 1);
      if (!works) continue;
      const int64_t first = (first_block + block) * kBlockColumns;
      multiply_block<A, kWhole>(streams[i], stage[block % kStages], lane, first, begin, end, sums);
      load(block + kAhead, streams[i]);
      const int64_t next = first + kBlockColumns;
      if ((next - origin) % kChunkColumns != 0 && block + 1 < blocks) continue;
      sums.add_rest();
      tree.push(static_cast<int>((first - origin) / kChunkColumns), sums);
      sums.clear();
    }
  }
  if (!works) return;
  tree.finish(sums);
  store_sums<A>(a, to, sums, token, mix_group * kTiles * kMixTile, split, group, node, lane);
}

// The sums of nodes added up.
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
    const float sum =
        pairwise_sum(nodes, 0.0f, [&](int64_t node) { return __ldg(sums + node * stride + i); });
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
  arrays.take<Pack>(packs_of_parts(cut));
  arrays.take<float>(floats_of_nodes(a, cut));
  return arrays.bytes();
}

void prenorm_gemm_cuda(const PrenormGemmArgs& a, void* workspace, int device, void* stream) {
  if (a.sizes.tokens == 0) return;
  const Cut cut = cut_call(a);
  Workspace arrays(workspace);
  Pack* parts = arrays.take<Pack>(packs_of_parts(cut));
  float* nodes = arrays.take<float>(floats_of_nodes(a, cut));
  cuda::launch_each(kName, device, stream, packs_of_parts(cut) / kParts,
                    Prepare{a, cut.tiles, cut.column_blocks, parts});
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
  cuda::with_activation(a.sizes.activation, [&](auto activation) {
    using A = decltype(activation);
    const auto start = [&](auto kernel) {
      cuda::launch(kName, device, stream, kernel, grid, dim3(kThreads), 0, a, cut, to, parts);
    };
    if (cut.whole) {
      cut.tiles == 1 ? start(&prenorm_gemm<A, true, 1>) : start(&prenorm_gemm<A, true, 3>);
    } else {
      cut.tiles == 1 ? start(&prenorm_gemm<A, false, 1>) : start(&prenorm_gemm<A, false, 3>);
    }
  });
  if (cut.nodes == 1) return;
  cuda::launch_each(kName, device, stream, a.splits * a.sizes.tokens * a.groups * (a.mixes + 1),
                    AddNodes{a, cut.nodes, nodes});
}

}  // namespace ehc::mhc
