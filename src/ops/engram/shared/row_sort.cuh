// Positions of indices, ordered by the row that they name, on CUDA: a stable radix sort by digits
// of up to eight bits, in workspace memory. A stable order is unique, so no bit depends on blocks.
//
// A pass has three kernels: digits counted by tile, counts of a digit summed over the tiles before,
// entries placed. A tile is a run of entries; a warp has a run of them, and ranks 32 at a time
// among those of the same digit. The tile is ordered in shared memory before it is written, so that
// entries of a digit go out together.
#pragma once

#include <algorithm>
#include <bit>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/sums.cuh"
#include "core/forced_grid.h"
#include "core/workspace.h"
#include "ops/engram/shared/row_entry.h"
#include "ops/engram/shared/row_indices.h"

namespace ehc::engram {

inline constexpr int kSortThreads = 256;
inline constexpr int kSortWarps = kSortThreads / cuda::kWarp;
// Rounds of 32 entries a warp: many, so that entries of a digit go out together, and few where
// there are not enough tiles for all processors.
template <class Word>
inline constexpr int kManyRounds = 64 / sizeof(Word);
inline constexpr int kFewRounds = 4;
inline constexpr int64_t kFewTiles = 1024;  // of few rounds
inline constexpr int kDigitBits = 8;
inline constexpr int kDigits = 1 << kDigitBits;

// Entries of the first pass, made from indices. What names no row gets the row `rows`, behind all.
template <class Word>
struct IndexSource {
  RowIndices indices;
  int64_t columns;
  int64_t rows;
  bool is_dense;

  __device__ __forceinline__ RowEntry<Word> operator()(int64_t i) const {
    const int64_t row =
        is_dense ? row_index(indices, 0, i) : row_index(indices, i / columns, i % columns);
    return {static_cast<Word>(row >= 0 && row < rows ? row : rows), static_cast<Word>(i)};
  }
};

template <class Word>
struct EntrySource {
  const RowEntry<Word>* entries;
  __device__ __forceinline__ RowEntry<Word> operator()(int64_t i) const { return entries[i]; }
};

template <class Word>
__device__ __forceinline__ int digit_of(Word row, int shift) {
  return static_cast<int>(row >> shift) & (kDigits - 1);
}

// counts[digit * tiles + tile]
template <int kRounds, class Word, class Source>
__global__ void __launch_bounds__(kSortThreads)
    count_digits(const __grid_constant__ Source source, int64_t count, int shift, int64_t tiles,
                 Word* counts) {
  constexpr int kTile = kSortThreads * kRounds;
  __shared__ int of_digit[kDigits];
  of_digit[threadIdx.x] = 0;
  __syncthreads();
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kTile;
#pragma unroll 4
  for (int k = 0; k < kRounds; ++k) {
    const int64_t i = begin + k * kSortThreads + threadIdx.x;
    if (i < count) atomicAdd(&of_digit[digit_of(source(i).row, shift)], 1);
  }
  __syncthreads();
  counts[threadIdx.x * tiles + blockIdx.x] = static_cast<Word>(of_digit[threadIdx.x]);
}

// Exclusive sums over the threads of a block; `total` receives the sum of all.
template <class T>
__device__ __forceinline__ T sum_before(T x, T (&room)[kSortWarps], T& total) {
  const int lane = threadIdx.x % cuda::kWarp;
  const int warp = threadIdx.x / cuda::kWarp;
  T sum = x;
#pragma unroll
  for (int distance = 1; distance < cuda::kWarp; distance *= 2) {
    const T other = __shfl_up_sync(cuda::kAllLanes, sum, distance);
    if (lane >= distance) sum += other;
  }
  __syncthreads();  // the room may still be read
  if (lane == cuda::kWarp - 1) room[warp] = sum;
  __syncthreads();
  T before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kSortWarps; ++w) {
    before += w < warp ? room[w] : 0;
    total += room[w];
  }
  return before + sum - x;
}

// A block per line: its `count` numbers become the sums of those before; totals[line] of all.
template <class Word>
__global__ void __launch_bounds__(kSortThreads)
    sum_lines(Word* lines, int64_t count, Word* totals) {
  __shared__ Word room[kSortWarps];
  Word* line = lines + blockIdx.x * count;
  Word base = 0;
  for (int64_t first = 0; first < count; first += kSortThreads) {
    const int64_t i = first + threadIdx.x;
    const Word x = i < count ? line[i] : 0;
    Word total = 0;
    const Word before = sum_before(x, room, total);
    if (i < count) line[i] = base + before;
    base += total;
  }
  if (threadIdx.x == 0) totals[blockIdx.x] = base;
}

template <int kRounds, class Word, class Source>
__global__ void __launch_bounds__(kSortThreads)
    place_entries(const __grid_constant__ Source source, int64_t count, int shift, int64_t tiles,
                  const Word* counts, const Word* totals, RowEntry<Word>* to) {
  constexpr int kTile = kSortThreads * kRounds;
  __shared__ RowEntry<Word> tile[kTile];
  __shared__ int of_warp[kSortWarps][kDigits];  // counts, then places within the tile
  __shared__ Word place[kDigits];               // of a digit's first entry, less that in the tile
  __shared__ Word word_room[kSortWarps];
  __shared__ int room[kSortWarps];
  const int lane = threadIdx.x % cuda::kWarp;
  const int warp = threadIdx.x / cuda::kWarp;
  for (int w = 0; w < kSortWarps; ++w) of_warp[w][threadIdx.x] = 0;
  __syncthreads();

  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kTile;
  const int there = static_cast<int>(min(count - begin, static_cast<int64_t>(kTile)));
  RowEntry<Word> entry[kRounds];
  int rank[kRounds];  // among the warp's entries of the same digit
#pragma unroll
  for (int k = 0; k < kRounds; ++k) {
    const int at = (warp * kRounds + k) * cuda::kWarp + lane;
    if (at < there) entry[k] = source(begin + at);
  }
#pragma unroll
  for (int k = 0; k < kRounds; ++k) {
    const int at = (warp * kRounds + k) * cuda::kWarp + lane;
    const int digit = at < there ? digit_of(entry[k].row, shift) : -1;
    const unsigned same = __match_any_sync(cuda::kAllLanes, digit);
    const int before = __popc(same & ((1U << lane) - 1));
    if (digit >= 0) rank[k] = of_warp[warp][digit] + before;
    __syncwarp();
    if (digit >= 0 && before == 0) of_warp[warp][digit] += __popc(same);
    __syncwarp();
  }
  __syncthreads();

  const int digit = threadIdx.x;  // a thread per digit
  int in_tile = 0;
  for (int w = 0; w < kSortWarps; ++w) {
    const int of_this = of_warp[w][digit];
    of_warp[w][digit] = in_tile;
    in_tile += of_this;
  }
  int ignored = 0;
  Word ignored_word = 0;
  const int first = sum_before(in_tile, room, ignored);
  const Word smaller = sum_before(totals[digit], word_room, ignored_word);
  for (int w = 0; w < kSortWarps; ++w) of_warp[w][digit] += first;
  place[digit] = smaller + counts[digit * tiles + blockIdx.x] - static_cast<Word>(first);
  __syncthreads();

#pragma unroll
  for (int k = 0; k < kRounds; ++k) {
    const int at = (warp * kRounds + k) * cuda::kWarp + lane;
    if (at < there) tile[of_warp[warp][digit_of(entry[k].row, shift)] + rank[k]] = entry[k];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < there; i += kSortThreads) {
    to[place[digit_of(tile[i].row, shift)] + static_cast<Word>(i)] = tile[i];
  }
}

// Entries of `count` indices in two halves of workspace memory.
template <class Word>
class RowSort {
 public:
  RowSort(Workspace& workspace, int64_t count, int64_t rows)
      : count_(count),
        is_few_(count < free_blocks(kFewTiles) * (kSortThreads * kFewRounds)),
        tiles_((count + tile() - 1) / tile()) {
    const int bits = std::bit_width(static_cast<uint64_t>(rows));  // of 0 ... rows
    passes_ = std::max(1, (bits + kDigitBits - 1) / kDigitBits);
    for (RowEntry<Word>*& half : halves_) half = workspace.take<RowEntry<Word>>(count);
    counts_ = workspace.take<Word>(kDigits * tiles_);
    totals_ = workspace.take<Word>(kDigits);
  }

  // The entries of all indices, those of none with the row `rows`.
  const RowEntry<Word>* sort(const char* name, const IndexSource<Word>& indices, int device,
                             void* stream) const {
    pass(name, indices, 0, halves_[0], device, stream);
    for (int p = 1; p < passes_; ++p) {
      pass(name, EntrySource<Word>{halves_[(p - 1) % 2]}, p * kDigitBits, halves_[p % 2], device,
           stream);
    }
    return halves_[(passes_ - 1) % 2];
  }

 private:
  [[nodiscard]] int64_t tile() const {
    return kSortThreads * (is_few_ ? kFewRounds : kManyRounds<Word>);
  }
  template <class Source>
  void pass(const char* name, const Source& source, int shift, RowEntry<Word>* to, int device,
            void* stream) const {
    const dim3 grid(cuda::blocks(tiles_));
    const dim3 block(kSortThreads);
    cuda::launch(name, device, stream,
                 is_few_ ? &count_digits<kFewRounds, Word, Source>
                         : &count_digits<kManyRounds<Word>, Word, Source>,
                 grid, block, 0, source, count_, shift, tiles_, counts_);
    cuda::launch(name, device, stream, &sum_lines<Word>, dim3(kDigits), block, 0, counts_, tiles_,
                 totals_);
    cuda::launch(name, device, stream,
                 is_few_ ? &place_entries<kFewRounds, Word, Source>
                         : &place_entries<kManyRounds<Word>, Word, Source>,
                 grid, block, 0, source, count_, shift, tiles_, counts_, totals_, to);
  }

  int64_t count_;
  bool is_few_;
  int64_t tiles_;
  int passes_;
  RowEntry<Word>* halves_[2] = {};
  Word* counts_ = nullptr;
  Word* totals_ = nullptr;
};

}  // namespace ehc::engram
