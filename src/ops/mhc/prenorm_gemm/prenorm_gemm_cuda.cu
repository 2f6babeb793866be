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

#include "backends/cuda/launch.cuh"
#include "backends/cuda/mma.cuh"
#include "core/float_formats.h"
#include "core/workspace.h"
#include "ops/mhc/prenorm_gemm/prenorm_gemm_args.h"
#include "ops/mhc/shared/pairwise_sum.h"
#include "ops/mhc/shared/stream_rows.cuh"

namespace ehc::mhc {

namespace {

using cuda::kPartsOf;

constexpr int kThreads = 256;
constexpr int kBlockColumns = 64;
constexpr int kHalves = 2;  // of a block, 32 columns each: a lane's 8 side by side
constexpr int kParts = 3;   // of fn
constexpr int kMixTile = 8;
constexpr int kTilePacks = kHalves * kParts * 32;  // of a block's parts for a tile of mixes
constexpr int kStages = 4;                         // blocks of parts in shared memory

// Tiles of 16 tokens of a warp.
template <class A, bool kWhole>
inline constexpr int kRowTiles = kWhole&& kPartsOf<A> == 1 ? 2 : 1;

// --- how a call is cut ---

struct Cut {
  int64_t tiles;       // of mixes that a block makes, 1 or 3
  int64_t mix_groups;  // of so many
  int64_t token_blocks;
  int64_t column_blocks;  // of 64
  int64_t nodes, chunks;  // a split is cut into `nodes` of `chunks` chunks each
  bool whole;             // all blocks of columns are, and rows move 16 bytes at a time
};

// The most chunks of a node: their tree is in local memory.
constexpr int kLevels = 6;
constexpr int64_t kMostChunks = int64_t{1} << (kLevels - 1);

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
  const int64_t tokens = kThreads / 2 * (cut.whole && a.sizes.activation == DType::bf16 ? 2 : 1);
  cut.token_blocks = (a.sizes.tokens + tokens - 1) / tokens;
  // Split 0 is the longest one.
  const Columns longest = columns_of_split(a, 0);
  const int64_t leaves = power_of_two_from(chunks_of_columns(longest.end - longest.begin));
  const int64_t others = cut.token_blocks * cut.mix_groups * a.splits * a.groups;
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

// --- the streams of a warp's tokens ---

// A lane's eight columns of a half as they are stored.
template <class A>
struct Eight {
  static constexpr int kPacks = 8 / kWidth<A>;
  Pack pack[kPacks];

  __device__ __forceinline__ float at(int k) const {
    return column<A>(pack[k / kWidth<A>], k % kWidth<A>);
  }
  // Parts of columns 2w and 2w + 1.
  __device__ __forceinline__ void words(int w, uint32_t (&word)[kPartsOf<A>]) const {
    if constexpr (kPartsOf<A> == 1) {
      word[0] = pack[0].word[w];
    } else {
      uint32_t low[3], high[3];
      cuda::parts_of(at(2 * w), low);
      cuda::parts_of(at(2 * w + 1), high);
#pragma unroll
      for (int p = 0; p < kPartsOf<A>; ++p) word[p] = cuda::side_by_side(low[p], high[p]);
    }
  }
};

template <class A, int kTiles>
struct BlockOfStreams {
  Eight<A> x[kTiles][2][kHalves];  // of rows l/4 and l/4 + 8 of every tile
};

template <class A, bool kWhole, int kTiles>
class Streams {
 public:
  __device__ __forceinline__ Streams(const PrenormGemmArgs& a, int64_t token, int lane) : a_(a) {
    is_flat_ = a.residual.stream_stride == a.sizes.hidden || a.sizes.streams == 1;
#pragma unroll
    for (int i = 0; i < kTiles * 2; ++i) {
      // Rows beyond the last token repeat it; nobody wants their sums.
      row_[i] = row_of<const A>(a.residual, min(token + i * 8 + lane / 4, a.sizes.tokens - 1));
    }
    first_ = lane % 4 * 8;
  }

  // The block from column `at` on; what is outside [begin, end) is zero.
  __device__ __forceinline__ void load(int64_t at, int64_t begin, int64_t end,
                                       BlockOfStreams<A, kTiles>& to) const {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int64_t first = at + h * 32 + first_;
#pragma unroll
      for (int p = 0; p < Eight<A>::kPacks; ++p) {
        const int64_t k = first + p * kWidth<A>;
        const int64_t offset = kWhole ? offset_of(k) : 0;
#pragma unroll
        for (int i = 0; i < kTiles * 2; ++i) {
          Pack& pack = to.x[i / 2][i % 2][h].pack[p];
          if constexpr (kWhole) {
            pack = cuda::load_once(row_[i] + offset);
          } else {
            pack = load_some(row_[i], k, begin, end);
          }
        }
      }
    }
  }

 private:
  __device__ __forceinline__ int64_t offset_of(int64_t k) const {
    const int64_t d = a_.sizes.hidden;
    return is_flat_ ? k : k / d * a_.residual.stream_stride + k % d;
  }
  __device__ __forceinline__ Pack load_some(const A* row, int64_t first, int64_t begin,
                                            int64_t end) const {
    constexpr int kOfWord = 4 / static_cast<int>(sizeof(A));
    Pack pack{};
#pragma unroll
    for (int i = 0; i < kWidth<A>; ++i) {
      if (first + i < begin || first + i >= end) continue;
      pack.word[i / kOfWord] |= cuda::bits_of(row[offset_of(first + i)]) << (i % kOfWord * 16);
    }
    return pack;
  }

  const PrenormGemmArgs& a_;
  const A* row_[kTiles * 2];
  int64_t first_;
  bool is_flat_;
};

// --- sums of a warp ---

template <int kRows, int kTiles>
struct Accumulator {
  float first[kRows][kTiles][4];  // of products of first parts, and of chunks
  float rest[kRows][kTiles][4];   // of all others
  float square[kRows][2];         // of a lane's columns

  __device__ __forceinline__ void clear() { *this = {}; }
  // A chunk is done.
  __device__ __forceinline__ void add_rest() {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) {
        const float sum = first[m][i / 4][i % 4] + rest[m][i / 4][i % 4];
        if (sum == sum) first[m][i / 4][i % 4] = sum;
      }
    }
  }
  template <class Body>
  __device__ __forceinline__ void for_each_sum(const Body& body) {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) body(first[m][i / 4][i % 4], m * (kTiles * 4 + 2) + i);
#pragma unroll
      for (int r = 0; r < 2; ++r) body(square[m][r], m * (kTiles * 4 + 2) + kTiles * 4 + r);
    }
  }
};

// The tree of pairwise_sum over the chunks of a node; chunks that are left out count as zeros.
template <int kCount>
class ChunkTree {
 public:
  // The sums of chunk `index`, which ascends; they are used up.
  template <class Accumulator>
  __device__ __forceinline__ void push(int index, Accumulator& sums) {
    int level = 0;
    for (; (index >> level & 1) != 0; ++level) take(level, sums);
    sums.for_each_sum([&](float& sum, int i) { level_[level][i] = sum; });
    filled_ |= 1U << level;
  }
  template <class Accumulator>
  __device__ __forceinline__ void finish(Accumulator& sums) {
    sums.clear();
    for (int level = 0; level < kLevels; ++level) take(level, sums);
  }

 private:
  template <class Accumulator>
  __device__ __forceinline__ void take(int level, Accumulator& sums) {
    if ((filled_ >> level & 1) == 0) return;
    sums.for_each_sum([&](float& sum, int i) { sum = level_[level][i] + sum; });
    filled_ &= ~(1U << level);
  }

  float level_[kLevels][kCount];
  uint32_t filled_ = 0;
};

// Zeros where the columns from `first` on are outside [begin, end): of a half, of a lane.
__device__ __forceinline__ Pack mask_of(int64_t first, int64_t begin, int64_t end) {
  Pack mask{};
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (first + k >= begin && first + k < end) mask.word[k / 2] |= 0xffffU << (k % 2 * 16);
  }
  return mask;
}

// A block of columns; of partial ones the columns outside are left out of fn too, for 0 times
// infinity would not be 0.
template <class A, bool kWhole, int kRows, int kTiles>
__device__ __forceinline__ void multiply_block(const BlockOfStreams<A, kRows>& streams,
                                               const Pack* parts, int lane, int64_t first,
                                               int64_t begin, int64_t end,
                                               Accumulator<kRows, kTiles>& sums) {
  constexpr int kOfStreams = kPartsOf<A>;
  float top[kRows][kTiles][4] = {};
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    uint32_t fn[kTiles][kParts][4];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const Pack pack = parts[j * kTilePacks + (h * kParts + p) * 32 + lane];
#pragma unroll
        for (int w = 0; w < 4; ++w) fn[j][p][w] = pack.word[w];
      }
    }
    if constexpr (!kWhole) {
      const Pack mask = mask_of(first + h * 32 + lane % 4 * 8, begin, end);
#pragma unroll
      for (int i = 0; i < kTiles * kParts * 4; ++i) {
        fn[i / (kParts * 4)][i / 4 % kParts][i % 4] &= mask.word[i % 4];
      }
    }
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const float x = streams.x[m][r][h].at(k);
          sums.square[m][r] = fmaf(x, x, sums.square[m][r]);
        }
      }
    }
#pragma unroll
    for (int w = 0; w < 4; w += 2) {
      uint32_t x[kRows][4][kOfStreams];
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) streams.x[m][i % 2][h].words(w + i / 2, x[m][i]);
      }
      const auto multiply = [&](auto& sum, int of_streams, int of_fn) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
#pragma unroll
          for (int m = 0; m < kRows; ++m) {
            cuda::multiply_bf16(sum[m][j], x[m][0][of_streams], x[m][1][of_streams],
                                x[m][2][of_streams], x[m][3][of_streams], fn[j][of_fn][w],
                                fn[j][of_fn][w + 1]);
          }
        }
      };
      multiply(top, 0, 0);
      multiply(sums.rest, 0, 1);
      multiply(sums.rest, 0, 2);
      if constexpr (kOfStreams > 1) {
        multiply(sums.rest, 1, 0);
        multiply(sums.rest, 1, 1);
      }
      if constexpr (kOfStreams > 2) multiply(sums.rest, 2, 0);
    }
  }
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) sums.first[m][i / 4][i % 4] += top[m][i / 4][i % 4];
  }
}

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
