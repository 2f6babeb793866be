// A warp's part of the projection on tensor cores: its tokens' streams in registers, a block of 64
// columns times the parts of fn, and the tree over chunks of columns. See prenorm_gemm_cuda.cu.
#pragma once

#include "backends/cuda/launch.cuh"
#include "backends/cuda/mma.cuh"
#include "ops/mhc/prenorm_gemm/prenorm_gemm_args.h"
#include "ops/mhc/shared/stream_rows.cuh"

namespace ehc::mhc::prenorm {

using cuda::kPartsOf;

inline constexpr int kBlockColumns = 64;
inline constexpr int kHalves = 2;  // of a block, 32 columns each: a lane's 8 side by side
inline constexpr int kParts = 3;   // of fn
inline constexpr int kMixTile = 8;
inline constexpr int kTilePacks = kHalves * kParts * 32;  // of a block's parts for a tile of mixes

// Tiles of 16 tokens of a warp.
template <class A, bool kWhole>
inline constexpr int kRowTiles = (kWhole && kPartsOf<A> == 1) ? 2 : 1;

// The tree over the chunks of a node has so many levels; it is in local memory.
inline constexpr int kLevels = 6;
inline constexpr int64_t kMostChunks = int64_t{1} << (kLevels - 1);

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

}  // namespace ehc::mhc::prenorm
