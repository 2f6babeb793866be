// The rows that sorted entries name, on CUDA: where each begins, and which number it has.
#pragma once

#include "ops/engram/gather_bwd/gather_bwd_math.h"
#include "ops/engram/shared/row_sort.cuh"

namespace ehc::engram {

inline constexpr int kListRounds = 4;  // entries of a thread where rows are listed
inline constexpr int64_t kListTile = int64_t{kSortThreads} * kListRounds;

inline int64_t list_tiles(int64_t count) { return (count + kListTile - 1) / kListTile; }

// What the kernels know of the sorted entries.
template <class Word>
struct NamedRows {
  const RowEntry<Word>* entries;
  int64_t count;  // of all entries
  int64_t rows;   // of the table; entries of this row name none
  Word* starts;   // [U+1]: where a row begins, and the number of entries that name one
  Word* unique;   // U

  __device__ __forceinline__ bool names(int64_t i) const {
    return static_cast<int64_t>(entries[i].row) < rows;
  }
  __device__ __forceinline__ bool begins(int64_t i) const {
    return names(i) && begins_row(entries, i);
  }
  // Are these two of one row, and there?
  __device__ __forceinline__ bool same(int64_t i, int64_t j) const {
    return j < count && names(i) && entries[i].row == entries[j].row;
  }
  // The number of the row that entry i names.
  __device__ __forceinline__ int64_t row_of(int64_t i) const {
    int64_t low = 0;
    int64_t high = static_cast<int64_t>(*unique) - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (static_cast<int64_t>(starts[middle]) <= i) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

// --- the list of rows ---

template <class Word>
__global__ void __launch_bounds__(kSortThreads)
    count_rows(const __grid_constant__ NamedRows<Word> named, Word* counts) {
  __shared__ int room[kSortWarps];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kListTile;
  int count = 0;
#pragma unroll 4
  for (int k = 0; k < kListRounds; ++k) {
    const int64_t i = begin + k * kSortThreads + threadIdx.x;
    if (i < named.count && named.begins(i)) ++count;
  }
  int total = 0;
  sum_before(count, room, total);
  if (threadIdx.x == 0) counts[blockIdx.x] = static_cast<Word>(total);
}

struct RowListing {
  void* unique_rows;  // [count], or null
  bool is_64;
  int64_t* unique_count;  // or null
  uint32_t* bitmap;       // of the rows that are named, or null

  __device__ __forceinline__ void store(int64_t u, int64_t row) const {
    if (unique_rows == nullptr) return;
    if (is_64) {
      static_cast<int64_t*>(unique_rows)[u] = row;
    } else {
      static_cast<int32_t*>(unique_rows)[u] = static_cast<int32_t>(row);
    }
  }
};

// `before`: rows that begin in the tiles before.
template <class Word>
__global__ void __launch_bounds__(kSortThreads)
    list_rows(const __grid_constant__ NamedRows<Word> named, const Word* before,
              const __grid_constant__ RowListing list) {
  __shared__ int room[kSortWarps];
  const auto unique = static_cast<int64_t>(*named.unique);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kListTile;
  auto base = static_cast<int64_t>(before[blockIdx.x]);
  if (begin == 0 && threadIdx.x == 0) {
    if (list.unique_count != nullptr) *list.unique_count = unique;
    if (unique == 0) named.starts[0] = 0;
  }
  for (int k = 0; k < kListRounds; ++k) {
    const int64_t i = begin + k * kSortThreads + threadIdx.x;
    const bool is_there = i < named.count;
    const bool begins = is_there && named.begins(i);
    int total = 0;
    const int64_t u = base + sum_before(begins ? 1 : 0, room, total);
    base += total;
    if (!is_there) continue;
    const auto row = static_cast<int64_t>(named.entries[i].row);
    if (begins) {
      named.starts[u] = static_cast<Word>(i);
      list.store(u, row);
      if (list.bitmap != nullptr) atomicOr(list.bitmap + row / 32, 1U << (row % 32));
    }
    const bool is_last = named.names(i) && (i + 1 == named.count || !named.names(i + 1));
    if (is_last) named.starts[unique] = static_cast<Word>(i + 1);
    if (i >= unique) list.store(i, -1);
  }
}

}  // namespace ehc::engram
