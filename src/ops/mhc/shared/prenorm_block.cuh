// A warp's part of the projection on tensor cores: its tokens' streams in registers, a block of 64
// columns times the parts of fn, and the tree over chunks of columns. See prenorm_gemm_cuda.cu.
#pragma once

#include "backends/cuda/async_copy.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/mma.cuh"
#include "ops/mhc/prenorm_gemm/prenorm_gemm_args.h"
#include "ops/mhc/shared/stream_rows.cuh"

namespace ehc::mhc::prenorm {

using cuda::kPartsOf;

inline constexpr int kBlockColumns = 64;
inline constexpr int kHalves = 2;  // of a block, 32 columns each: a lane's 8 side by side
inline constexpr int kSteps = 4;   // of a block, 16 columns each: a lane's 4 side by side
inline constexpr int kParts = 3;   // of fn
inline constexpr int kOctet = 8;   // mixes of half a tile, and tokens of a tile

// --- tiles of fn: 16 rows, which are two octets of mixes of one part each ---

struct HalfTile {
  int part, octet;  // no octet: -1
};

template <int kOctets>
inline constexpr int kFnTiles = kOctets == 1 ? 2 : 5;

// First parts keep to themselves: what is infinite in them is not in the others.
template <int kOctets>
__device__ __forceinline__ HalfTile half_tile(int tile, int upper) {
  if constexpr (kOctets == 1) {
    return tile == 0 ? HalfTile{0, upper == 0 ? 0 : -1} : HalfTile{1 + upper, 0};
  } else {
    switch (tile) {
      case 0:
        return {0, upper};
      case 1:
        return {0, upper == 0 ? 2 : -1};
      case 2:
        return {1, upper};
      case 3:
        return {2, upper};
      default:
        return {1 + upper, 2};
    }
  }
}

// Packs of a block: [steps, tiles, lanes]. A lane has mix l/4 of either half, columns 4(l%4) of a
// step in the order that multiply_bf16 wants.
template <int kOctets>
inline constexpr int kBlockPacks = kSteps* kFnTiles<kOctets> * 32;

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
  Eight<A> x[kTiles][kHalves];  // of token l/4 of every tile
};

// A warp's block as it comes through shared memory: [tokens, pieces of 16 bytes], where
// neighbouring rows have their pieces in another order, so that lanes meet no conflicts.
template <class A, int kTiles>
struct StreamStage {
  static constexpr int kPieces = kBlockColumns / kWidth<A>;
  static constexpr int kPacks = kTiles * kOctet * kPieces;
  static constexpr int kFlip = kPieces == 8 ? 4 : 1;

  __device__ __forceinline__ static int place(int row, int piece) {
    return row * kPieces + (piece ^ (row % 2 * kFlip));
  }
};

// For rows whose streams lie side by side, on borders of 16 bytes, and whole blocks.
template <class A, int kTiles>
class WholeStreams {
  using Stage = StreamStage<A, kTiles>;
  static constexpr int kRows = 32 / Stage::kPieces;  // that a warp copies at a time

 public:
  __device__ __forceinline__ WholeStreams(const PrenormGemmArgs& a, int64_t token, int lane)
      : lane_(lane), tokens_(a.sizes.tokens - token - lane / Stage::kPieces) {
    row_ = row_of<const A>(a.residual, token + lane / Stage::kPieces) +
           lane % Stage::kPieces * kWidth<A>;
    step_ = kRows * a.residual.token_stride;
    safe_ = a.residual.data;
  }

  __device__ __forceinline__ void copy(int64_t at, Pack* stage) const {
    const A* from = row_ + at;
#pragma unroll
    for (int i = 0; i < Stage::kPacks / 32; ++i, from += step_) {
      const int row = i * kRows + lane_ / Stage::kPieces;
      const bool exists = i * kRows < tokens_;
      cuda::start_copy(stage + Stage::place(row, lane_ % Stage::kPieces), exists ? from : safe_,
                       exists);
    }
  }
  __device__ __forceinline__ void load(const Pack* stage, BlockOfStreams<A, kTiles>& to) const {
    constexpr int kPacks = Eight<A>::kPacks;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          to.x[i][h].pack[p] =
              stage[Stage::place(i * kOctet + lane_ / 4, (h * 4 + lane_ % 4) * kPacks + p)];
        }
      }
    }
  }

 private:
  int lane_;
  int64_t tokens_;  // from the lane's first row on
  const A* row_;
  int64_t step_;
  const void* safe_;
};

// For all others, element by element.
template <class A, int kTiles>
class AnyStreams {
 public:
  __device__ __forceinline__ AnyStreams(const PrenormGemmArgs& a, int64_t token, int lane)
      : a_(a), token_(token), lane_(lane) {}

  // The block from column `at` on; what is outside [begin, end) is zero.
  __device__ __forceinline__ void load(int64_t at, int64_t begin, int64_t end,
                                       BlockOfStreams<A, kTiles>& to) const {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      // Rows beyond the last token repeat it; nobody wants their sums.
      const int64_t t = min(token_ + i * kOctet + lane_ / 4, a_.sizes.tokens - 1);
      const A* row = row_of<const A>(a_.residual, t);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
#pragma unroll
        for (int p = 0; p < Eight<A>::kPacks; ++p) {
          const int64_t first = at + h * 32 + lane_ % 4 * 8 + p * kWidth<A>;
          to.x[i][h].pack[p] = load_some(row, first, begin, end);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ Pack load_some(const A* row, int64_t first, int64_t begin,
                                            int64_t end) const {
    constexpr int kOfWord = 4 / static_cast<int>(sizeof(A));
    const int64_t d = a_.sizes.hidden;
    Pack pack{};
#pragma unroll
    for (int i = 0; i < kWidth<A>; ++i) {
      const int64_t k = first + i;
      if (k < begin || k >= end) continue;
      const A x = row[k / d * a_.residual.stream_stride + k % d];
      pack.word[i / kOfWord] |= cuda::bits_of(x) << (i % kOfWord * 16);
    }
    return pack;
  }

  const PrenormGemmArgs& a_;
  int64_t token_;
  int lane_;
};

// --- sums of a warp ---

// Of tile i, a lane has tokens 2(l%4) and the next for mix l/4 of every octet, and squares of token
// l/4, of its columns.
template <int kOctets, int kTiles>
struct Accumulator {
  static constexpr int kRests = kOctets == 1 ? 1 : 2;
  static constexpr int kCount = kTiles * (kOctets * 2 + 1);

  float first[kTiles][kOctets][2];  // of products of first parts, and of chunks
  float rest[kTiles][kRests][4];    // of all others
  float square[kTiles];

  __device__ __forceinline__ void clear() { *this = {}; }
  // A chunk is done.
  __device__ __forceinline__ void add_rest() {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      // Here, for the tree of a node must have sums of all columns at its leaves.
      square[i] += __shfl_xor_sync(0xffffffffU, square[i], 1);
      square[i] += __shfl_xor_sync(0xffffffffU, square[i], 2);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const auto add = [&](float& of_first, float more) {
          const float sum = of_first + more;
          if (sum == sum) of_first = sum;
        };
        // The last octet has its second and third parts in one tile.
        const float* last = rest[i][kRests - 1];
        add(first[i][kOctets - 1][c], last[c] + last[2 + c]);
        if constexpr (kOctets > 1) {
          add(first[i][0][c], rest[i][0][c]);
          add(first[i][1][c], rest[i][0][2 + c]);
        }
      }
    }
  }
  template <class Body>
  __device__ __forceinline__ void for_each_sum(const Body& body) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int o = 0; o < kOctets * 2; ++o) {
        body(first[i][o / 2][o % 2], i * (kOctets * 2 + 1) + o);
      }
      body(square[i], i * (kOctets * 2 + 1) + kOctets * 2);
    }
  }
};

// The tree over the chunks of a node has so many levels; it is in local memory.
inline constexpr int kLevels = 6;
inline constexpr int64_t kMostChunks = int64_t{1} << (kLevels - 1);

// The tree of pairwise_sum over the chunks of a node; chunks that are left out count as zeros.
template <int kCount>
class ChunkTree {
 public:
  // The sums of chunk `index`, which ascends; they are used up.
  template <class Sums>
  __device__ __forceinline__ void push(int index, Sums& sums) {
    int level = 0;
    for (; (index >> level & 1) != 0; ++level) take(level, sums);
    sums.for_each_sum([&](float& sum, int i) { level_[level][i] = sum; });
    filled_ |= 1U << level;
  }
  template <class Sums>
  __device__ __forceinline__ void finish(Sums& sums) {
    sums.clear();
    for (int level = 0; level < kLevels; ++level) take(level, sums);
  }

 private:
  template <class Sums>
  __device__ __forceinline__ void take(int level, Sums& sums) {
    if ((filled_ >> level & 1) == 0) return;
    sums.for_each_sum([&](float& sum, int i) { sum = level_[level][i] + sum; });
    filled_ &= ~(1U << level);
  }

  float level_[kLevels][kCount];
  uint32_t filled_ = 0;
};

// Zeros where the columns from `first` on are outside [begin, end): two of a word.
__device__ __forceinline__ uint32_t mask_of(int64_t first, int64_t begin, int64_t end) {
  const auto half = [&](int64_t k) { return k >= begin && k < end ? 0xffffU : 0U; };
  return half(first) | half(first + 1) << 16;
}

// A block of columns; of partial ones the columns outside are left out of fn too, for 0 times
// infinity would not be 0.
template <class A, bool kWhole, int kOctets, int kTiles>
__device__ __forceinline__ void multiply_block(const BlockOfStreams<A, kTiles>& streams,
                                               const Pack* fn, int lane, int64_t first,
                                               int64_t begin, int64_t end,
                                               Accumulator<kOctets, kTiles>& sums) {
  constexpr int kOfStreams = kPartsOf<A>;
  constexpr int kFirsts = kOctets == 1 ? 1 : 2;  // tiles of first parts
  float top[kTiles][kFirsts][4] = {};
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int h = s / 2;
    const int w = s % 2 * 2;
    uint32_t x[kTiles][2][kOfStreams];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      streams.x[i][h].words(w, x[i][0]);
      streams.x[i][h].words(w + 1, x[i][1]);
    }
    uint32_t masks[2] = {};
    if constexpr (!kWhole) {
      const int64_t at = first + h * 32 + lane % 4 * 8 + w * 2;
      masks[0] = mask_of(at, begin, end);
      masks[1] = mask_of(at + 2, begin, end);
    }
    const auto multiply = [&](float(&sum)[4], const Pack& y, int i, int p) {
      cuda::multiply_bf16(sum, y.word[0], y.word[1], y.word[2], y.word[3], x[i][0][p], x[i][1][p]);
    };
#pragma unroll
    for (int f = 0; f < kFnTiles<kOctets>; ++f) {
      Pack y = fn[(s * kFnTiles<kOctets> + f) * 32 + lane];
      if constexpr (!kWhole) {
#pragma unroll
        for (int i = 0; i < 4; ++i) y.word[i] &= masks[i / 2];
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (f < kFirsts) {
          multiply(top[i][f], y, i, 0);
          // In the rest first parts are where their second parts are, but for the last octet.
          constexpr int kLast = Accumulator<kOctets, kTiles>::kRests - 1;
          float(&rest)[4] = sums.rest[i][f == kFirsts - 1 ? kLast : 0];
#pragma unroll
          for (int p = 1; p < kOfStreams; ++p) multiply(rest, y, i, p);
        } else {
          constexpr int kLast = Accumulator<kOctets, kTiles>::kRests - 1;
          float(&rest)[4] = sums.rest[i][f == kFnTiles<kOctets> - 1 ? kLast : 0];
          multiply(rest, y, i, 0);
          // Of third parts of fn only the product with first ones counts; where second and third
          // ones share a tile it comes along.
          if constexpr (kOfStreams > 1) {
            if (f == kFirsts || f == kFnTiles<kOctets> - 1) multiply(rest, y, i, 1);
          }
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float x = streams.x[i][h].at(k);
        sums.square[i] = fmaf(x, x, sums.square[i]);
      }
    }
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
#pragma unroll
      for (int c = 0; c < 2; ++c) sums.first[i][o][c] += top[i][o / 2][o % 2 * 2 + c];
    }
  }
}

}  // namespace ehc::mhc::prenorm
