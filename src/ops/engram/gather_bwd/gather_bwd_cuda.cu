// engram.gather_bwd on CUDA (sm_80+): grad_table[r] (+)= sum of grad[t, c*hd:(c+1)*hd] over (t,c)
// with index r. grad A[T,C*hd], grad_table F32[rows,hd], or F32[U,hd] of the rows named
//
// Bytes: grad and indices once, every output row once; 3 to 4 times 8 bytes an index for each digit
// of 8 bits that sorting takes.
// Algorithm: entries (row, t*C + c) are sorted by row (row_sort.cuh); the places where a row begins
// are listed, a scan gives each its number. Threads of a row have 16 bytes of its columns each and
// add its summands in ascending position. Rows that are named very often are cut into chains of 256
// (gather_bwd_math.h), each summed apart, then added by a block. Rows that no index names are
// filled by a kernel that finds the others in a bitmap. How many rows there are stays on the
// device. No floating-point atomics; the bits are those of the CPU's kernels. Class R.
#include <bit>

#include "ops/engram/gather_bwd/gather_bwd_args.h"
#include "ops/engram/gather_bwd/gather_bwd_math.h"
#include "ops/engram/shared/named_rows.cuh"
#include "ops/engram/shared/row_sort.cuh"
#include "ops/engram/shared/table_rows.cuh"

namespace ehc::engram {

namespace {

constexpr const char* kName = "engram.gather_bwd";
constexpr int kThreads = kSortThreads;
constexpr int64_t kSlot = kGradientChain;

struct ClearWords {
  uint32_t* words;
  __device__ void operator()(int64_t i) const { words[i] = 0; }
};
struct ClearCount {
  int64_t* count;
  __device__ void operator()(int64_t) const { *count = 0; }
};

// --- sums ---

// Some columns of a sum, and where they go.
template <class A, bool kVector>
struct Sum {
  static constexpr int kColumns = kWidth<A>;
  float value[kColumns] = {};

  __device__ __forceinline__ void add(const Pack& pack) {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) value[k] += cuda::column<A>(pack, k);
  }
  __device__ __forceinline__ void store(float* to, const float* target, int64_t count) const {
#pragma unroll
    for (int p = 0; p < kColumns / 4; ++p) {
      Pack base{};
      if (target != nullptr) base = cuda::load_pack<kVector>(target + 4 * p, count - 4 * p);
      const Pack sum = cuda::make_pack<float>([&](int k) {
        const float x = value[4 * p + k];
        return target != nullptr ? cuda::column<float>(base, k) + x : x;
      });
      cuda::store_pack<kVector>(to + 4 * p, sum, count - 4 * p);
    }
  }
};

__device__ __forceinline__ float* row_out(const GatherBackwardArgs& a, int64_t row, int64_t u) {
  return a.out + (a.dense ? row : u) * a.out_stride;
}
__device__ __forceinline__ const float* row_target(const GatherBackwardArgs& a, int64_t row) {
  return a.target == nullptr ? nullptr : a.target + row * a.target_stride;
}

// The chain of an item: items [0, slots) are chains behind the first one of their row, of which at
// most one begins in each slot of 256 entries; then come the first chains of all rows.
template <class Word>
struct Chain {
  int64_t begin = 0, end = 0, u = 0;
  bool is_alone = false;  // the whole row

  __device__ __forceinline__ bool find(const NamedRows<Word>& named, int64_t item, int64_t slots) {
    int64_t last = 0;
    if (item >= slots) {
      u = item - slots;
      if (u >= static_cast<int64_t>(*named.unique)) return false;
      begin = static_cast<int64_t>(named.starts[u]);
      last = static_cast<int64_t>(named.starts[u + 1]);
      is_alone = last - begin < 2 * kGradientChain;
    } else {
      const int64_t first = item * kSlot;
      if (item == 0 || !named.same(first - 1, first + kSlot - 1)) return false;
      u = named.row_of(first);
      const auto row_begin = static_cast<int64_t>(named.starts[u]);
      last = static_cast<int64_t>(named.starts[u + 1]);
      begin = row_begin + (first - row_begin + kSlot - 1) / kSlot * kSlot;
      if (last - begin < kGradientChain) return false;
    }
    end = last - begin < 2 * kGradientChain ? last : begin + kGradientChain;
    return true;
  }
};

template <class Word, class A, bool kVector>
__global__ void sum_chains(const __grid_constant__ GatherBackwardArgs a,
                           const __grid_constant__ NamedRows<Word> named, int64_t slots,
                           bool is_dense, int64_t column_blocks) {
  constexpr int kAtOnce = 4;
  const RowPlace at(column_blocks, kWidth<A>, 1);
  const int64_t count = a.width - at.column;
  if (count <= 0 || at.row >= slots + named.count) return;
  Chain<Word> chain;
  if (!chain.find(named, at.row, slots)) return;
  const A* grad = static_cast<const A*>(a.grad) + at.column;
  const auto columns = static_cast<Word>(a.columns);
  Sum<A, kVector> sum;
  for (int64_t i = chain.begin; i < chain.end; i += kAtOnce) {
    Pack pack[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (i + k >= chain.end) continue;
      const Word position = named.entries[i + k].at;
      const A* from = is_dense
                          ? grad + static_cast<int64_t>(position) * a.width
                          : grad + static_cast<int64_t>(position / columns) * a.grad_token_stride +
                                static_cast<int64_t>(position % columns) * a.width;
      pack[k] = cuda::load_pack<kVector>(from, count);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (i + k < chain.end) sum.add(pack[k]);
    }
  }
  if (chain.is_alone) {
    const auto row = static_cast<int64_t>(named.entries[chain.begin].row);
    const float* target = row_target(a, row);
    sum.store(row_out(a, row, chain.u) + at.column,
              target == nullptr ? nullptr : target + at.column, count);
  } else {
    sum.store(a.partials + chain.begin / kGradientChain * a.width + at.column, nullptr, count);
  }
}

// A block per slot: adds the chains of the row of several that begins there, in chains again, whose
// sums take the place of their first summand.
template <class Word>
__global__ void __launch_bounds__(kThreads)
    add_chains(const __grid_constant__ GatherBackwardArgs a,
               const __grid_constant__ NamedRows<Word> named) {
  const int64_t first = blockIdx.x * kSlot;
  const int64_t inside = first + kSlot - 1;
  if (!named.same(inside, inside + kSlot)) return;
  if (first > 0 && named.same(first - 1, inside)) return;
  const int64_t u = named.row_of(inside);
  const auto begin = static_cast<int64_t>(named.starts[u]);
  const int64_t chains = (static_cast<int64_t>(named.starts[u + 1]) - begin) / kGradientChain;
  if (chains < 2) return;
  float* partials = a.partials + begin / kGradientChain * a.width;
  const int64_t groups = max(int64_t{1}, static_cast<int64_t>(chains / kGradientChain));
  for (int64_t i = threadIdx.x; i < groups * a.width; i += kThreads) {
    const int64_t from = i / a.width * kGradientChain;
    const int64_t to = i / a.width + 1 == groups ? chains : from + kGradientChain;
    float* column = partials + i % a.width;
    float sum = 0;
#pragma unroll 8
    for (int64_t k = from; k < to; ++k) sum += column[k * a.width];
    column[from * a.width] = sum;
  }
  __syncthreads();
  const auto row = static_cast<int64_t>(named.entries[begin].row);
  const float* target = row_target(a, row);
  for (int64_t j = threadIdx.x; j < a.width; j += kThreads) {
    float total = 0;
    for (int64_t g = 0; g < groups; ++g) total += partials[g * kGradientChain * a.width + j];
    row_out(a, row, u)[j] = target == nullptr ? total : target[j] + total;
  }
}

// Rows that no index names. `bitmap` null: all.
constexpr int kFillRows = 4;

template <bool kVector>
__global__ void fill_rows(const __grid_constant__ GatherBackwardArgs a, const uint32_t* bitmap,
                          int64_t rows, int64_t column_blocks) {
  const RowPlace at(column_blocks, 4, kFillRows);
  const int64_t count = a.width - at.column;
  if (count <= 0) return;
#pragma unroll
  for (int k = 0; k < kFillRows; ++k) {
    const int64_t row = at.row + k * blockDim.y;
    if (row >= rows) return;
    if (bitmap != nullptr && (bitmap[row / 32] >> (row % 32) & 1U) != 0) continue;
    const float* target = row_target(a, row);
    Pack pack{};
    if (target != nullptr) pack = cuda::load_pack<kVector>(target + at.column, count);
    cuda::store_pack<kVector>(row_out(a, row, 0) + at.column, pack, count);
  }
}

// --- the whole ---

bool are_vectors(const GatherBackwardArgs& a) {
  return a.width % 4 == 0 && are_aligned(a.out, a.out_stride, sizeof(float)) &&
         (a.target == nullptr || are_aligned(a.target, a.target_stride, sizeof(float)));
}

void fill(const GatherBackwardArgs& a, const uint32_t* bitmap, int64_t rows, int device,
          void* stream) {
  if (rows == 0) return;
  launch_rows(kName, device, stream, cut_rows(rows, a.width, 4, kFillRows),
              are_vectors(a) ? &fill_rows<true> : &fill_rows<false>, a, bitmap, rows);
}

template <class Word>
struct Scratch {
  RowSort<Word> sort;
  Word* counts;  // of tiles
  Word* unique;
  Word* starts;
  float* partials;
  int64_t words;  // of the bitmap
  uint32_t* bitmap;

  Scratch(Workspace& workspace, int64_t count, int64_t rows, int64_t width, bool fills)
      : sort(workspace, count, rows),
        counts(workspace.take<Word>(list_tiles(count))),
        unique(workspace.take<Word>(1)),
        starts(workspace.take<Word>(count + 1)),
        partials(workspace.take<float>((count + kSlot - 1) / kSlot * width)),
        words(fills ? (rows + 31) / 32 : 0),
        bitmap(workspace.take<uint32_t>(words)) {}
};

template <class Word>
void run(GatherBackwardArgs a, const RowIndices& indices, int64_t tokens, int64_t rows,
         int64_t* unique_count, void* memory, int device, void* stream) {
  const int64_t count = tokens * a.columns;
  Workspace workspace(memory);
  const Scratch<Word> scratch(workspace, count, rows, a.width, a.fill);
  const bool indices_are_dense = tokens == 1 || indices.token_stride == a.columns;
  a.partials = scratch.partials;

  const RowEntry<Word>* entries =
      scratch.sort.sort(kName, {indices, a.columns, rows, indices_are_dense}, device, stream);
  const NamedRows<Word> named = {entries, count, rows, scratch.starts, scratch.unique};
  const RowListing list = {a.dense ? nullptr : a.unique_rows, a.unique_is_64, unique_count,
                           a.fill ? scratch.bitmap : nullptr};
  const int64_t tiles = list_tiles(count);
  const dim3 grid(cuda::blocks(tiles));
  const dim3 block(kThreads);
  if (a.fill) {
    cuda::launch_each(kName, device, stream, scratch.words, ClearWords{scratch.bitmap});
  }
  cuda::launch(kName, device, stream, &count_rows<Word>, grid, block, 0, named, scratch.counts);
  cuda::launch(kName, device, stream, &sum_lines<Word>, dim3(1), block, 0, scratch.counts, tiles,
               scratch.unique);
  cuda::launch(kName, device, stream, &list_rows<Word>, grid, block, 0, named, scratch.counts,
               list);
  if (a.fill) fill(a, scratch.bitmap, rows, device, stream);

  const int64_t slots = (count + kSlot - 1) / kSlot;
  const bool grad_is_dense = tokens == 1 || a.grad_token_stride == a.columns * a.width;
  cuda::with_activation(a.type, [&](auto type) {
    using A = decltype(type);
    const bool vector = are_vectors(a) && a.width % kWidth<A> == 0 &&
                        are_aligned(a.grad, grad_is_dense ? 0 : a.grad_token_stride, sizeof(A));
    with_flag(vector, [&](auto is_vector) {
      launch_rows(kName, device, stream, cut_rows(slots + count, a.width, kWidth<A>, 1),
                  &sum_chains<Word, A, is_vector()>, a, named, slots, grad_is_dense);
    });
  });
  cuda::launch(kName, device, stream, &add_chains<Word>, dim3(cuda::blocks(slots)), block, 0, a,
               named);
}

bool fits_32_bits(int64_t count, int64_t rows) {
  return count < int64_t{UINT32_MAX} && rows <= int64_t{UINT32_MAX};
}

}  // namespace

size_t gather_bwd_cuda_workspace(int64_t count, int64_t rows, int64_t width, bool fills) {
  if (count == 0) return 0;
  Workspace workspace(nullptr);
  if (fits_32_bits(count, rows)) {
    Scratch<uint32_t>(workspace, count, rows, width, fills);
  } else {
    Scratch<uint64_t>(workspace, count, rows, width, fills);
  }
  return workspace.bytes();
}

void gather_bwd_cuda(const GatherBackwardArgs& a, const RowIndices& indices, int64_t tokens,
                     int64_t rows, int64_t* unique_count, void* workspace, int device,
                     void* stream) {
  const int64_t count = tokens * a.columns;
  if (count == 0) {
    if (a.fill) fill(a, nullptr, rows, device, stream);
    if (unique_count != nullptr) {
      cuda::launch_each(kName, device, stream, 1, ClearCount{unique_count});
    }
  } else if (fits_32_bits(count, rows)) {
    run<uint32_t>(a, indices, tokens, rows, unique_count, workspace, device, stream);
  } else {
    run<uint64_t>(a, indices, tokens, rows, unique_count, workspace, device, stream);
  }
}

}  // namespace ehc::engram
