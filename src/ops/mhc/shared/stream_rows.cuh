// Rows of streams and coefficients as the CUDA kernels use them, and how a call is cut into blocks.
#pragma once

#include <algorithm>
#include <type_traits>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/pack.cuh"
#include "core/forced_grid.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

using cuda::column;
using cuda::kWidth;
using cuda::Pack;

// --- the streams of a kernel: a constant for two and four, else 0, which stands for any ---

template <int kStreams>
inline constexpr int kRoom = kStreams == 0 ? kMaxStreams : kStreams;

template <int kStreams>
__device__ __forceinline__ int count_of(int64_t streams) {
  return kStreams == 0 ? static_cast<int>(streams) : kStreams;
}

template <class Body>
void with_streams(int64_t streams, const Body& body) {
  if (streams == 4) {
    body(std::integral_constant<int, 4>{});
  } else if (streams == 2) {
    body(std::integral_constant<int, 2>{});
  } else {
    body(std::integral_constant<int, 0>{});
  }
}

// Calls body(a, streams, vector): the storage type, the streams as above, and whether rows move 16
// bytes at a time; rows that cannot have kernels for any number of streams alone.
template <class Body>
void with_kernel(const StreamSizes& sizes, bool vector, const Body& body) {
  cuda::with_activation(sizes.activation, [&](auto a) {
    if (!vector) return body(a, std::integral_constant<int, 0>{}, std::false_type{});
    with_streams(sizes.streams, [&](auto streams) { body(a, streams, std::true_type{}); });
  });
}

// Do all packs of these rows lie on borders of 16 bytes? Absent rows do.
template <class... Rows>
bool are_vectors(const StreamSizes& sizes, const Rows&... rows) {
  const auto size = static_cast<int64_t>(size_of(sizes.activation));
  const auto fits = [&](const StreamRows& r) {
    return reinterpret_cast<uintptr_t>(r.data) % 16 == 0 && r.token_stride * size % 16 == 0 &&
           r.stream_stride * size % 16 == 0;
  };
  return sizes.hidden * size % 16 == 0 && (fits(rows) && ...);
}

// Do all lines of these coefficients that load_line takes at once lie on borders of 16 bytes?
template <class... Matrices>
bool are_lines(const StreamSizes& sizes, const Matrices&... matrices) {
  const auto fits = [](const Coefficients& c) {
    return reinterpret_cast<uintptr_t>(c.data) % 16 == 0 && c.token_stride % 4 == 0 &&
           c.row_stride % 4 == 0;
  };
  return sizes.streams != 4 || (fits(matrices) && ...);
}

// --- rows and coefficients of a token ---

template <class A>
__device__ __forceinline__ A* row_of(const StreamRows& rows, int64_t token, int64_t stream = 0) {
  return static_cast<A*>(rows.data) + token * rows.token_stride + stream * rows.stream_stride;
}

// The pack of every stream that starts at `at`, of whose columns `count` exist.
template <int kStreams, bool kVector, class A>
__device__ __forceinline__ void load_streams(const StreamRows& rows, int64_t token, int64_t at,
                                             int64_t count, int64_t streams,
                                             Pack (&packs)[kRoom<kStreams>]) {
  each_stream(count_of<kStreams>(streams), [&](int i) {
    packs[i] = cuda::load_pack<kVector>(row_of<const A>(rows, token, i) + at, count);
  });
}

// n values side by side; nothing may write them meanwhile. kLine: known to be on a border of 16
// bytes, as are_lines says. A branch on that would wait for what it loads.
template <int kStreams, bool kLine = false>
__device__ __forceinline__ void load_line(const float* from, int64_t streams, float* to) {
  const auto at_once = [&] {
    const float4 v = __ldg(reinterpret_cast<const float4*>(from));
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  };
  if constexpr (kStreams == 4 && kLine) {
    at_once();
  } else {
    if constexpr (kStreams == 4) {
      if (reinterpret_cast<uintptr_t>(from) % 16 == 0) return at_once();
    }
    each_stream(count_of<kStreams>(streams), [&](int i) { to[i] = __ldg(from + i); });
  }
}

// F32[n] of a token.
template <int kStreams, bool kLine = false>
struct StreamVector {
  float value[kRoom<kStreams>];

  StreamVector() = default;
  __device__ __forceinline__ StreamVector(const Coefficients& from, int64_t token,
                                          int64_t streams) {
    load_line<kStreams, kLine>(from.data + token * from.token_stride, streams, value);
  }
  __device__ __forceinline__ float operator[](int i) const { return value[i]; }
};

// F32[n,n] of a token.
template <int kStreams, bool kLines = false>
struct StreamMatrix {
  float value[kRoom<kStreams>][kRoom<kStreams>];

  StreamMatrix() = default;
  __device__ __forceinline__ StreamMatrix(const Coefficients& from, int64_t token,
                                          int64_t streams) {
    const float* first = from.data + token * from.token_stride;
    each_stream(count_of<kStreams>(streams), [&](int i) {
      load_line<kStreams, kLines>(first + i * from.row_stride, streams, value[i]);
    });
  }
  __device__ __forceinline__ const float* operator[](int i) const { return value[i]; }
};

// --- a thread per pack or few of them, for operators without sums over d ---

struct ColumnCut {
  int64_t column_blocks;  // blocks side by side in a row
  dim3 grid, block;       // block.y tokens of block.x packs each
};

inline constexpr int kMostColumnThreads = 256;
// Of a block when there is little to do, so that it spreads over the device.
inline constexpr int kFewColumnThreads = 64;
inline constexpr int64_t kFewColumnBlocks = 512;

// Blocks whose threads take `packs_of_thread` each, a block's width apart.
inline ColumnCut cut_columns(const StreamSizes& sizes, int packs_of_thread = 1) {
  const int64_t packs =
      cuda::packs_of(sizes.hidden, 16 / static_cast<int>(size_of(sizes.activation)));
  const int64_t few_packs = free_blocks(kFewColumnBlocks) * kFewColumnThreads;
  const int64_t threads =
      packs <= few_packs / sizes.tokens ? kFewColumnThreads : kMostColumnThreads;
  const int64_t column_blocks =
      (packs + packs_of_thread * threads - 1) / (packs_of_thread * threads);
  int64_t wide = (packs + packs_of_thread * column_blocks - 1) / (packs_of_thread * column_blocks);
  if (column_blocks > 1) wide = (wide + 31) / 32 * 32;
  const int64_t tokens = std::min(std::max<int64_t>(1, threads / wide), sizes.tokens);
  return {column_blocks, dim3(cuda::blocks((sizes.tokens + tokens - 1) / tokens * column_blocks)),
          dim3(static_cast<unsigned>(wide), static_cast<unsigned>(tokens))};
}

// The pack of a thread, or its first.
struct Place {
  int64_t token, column, count;  // `count` columns exist from `column` on; none: no work

  template <class A>
  __device__ __forceinline__ static Place of_thread(const StreamSizes& sizes, int64_t column_blocks,
                                                    unsigned block = blockIdx.x,
                                                    int packs_of_thread = 1) {
    const unsigned cut = static_cast<unsigned>(column_blocks);
    const int64_t token = static_cast<int64_t>(block / cut) * blockDim.y + threadIdx.y;
    const int64_t first = static_cast<int64_t>(block % cut) * blockDim.x * packs_of_thread;
    const int64_t pack = first + threadIdx.x;
    const int64_t count = token < sizes.tokens ? sizes.hidden - pack * kWidth<A> : 0;
    return {token, pack * kWidth<A>, count};
  }
};

template <class... Params, class... Values>
void launch_columns(const char* name, int device, void* stream, const StreamSizes& sizes,
                    void (*kernel)(Params...), Values... values) {
  if (sizes.tokens == 0) return;
  const ColumnCut cut = cut_columns(sizes);
  cuda::launch(name, device, stream, kernel, cut.grid, cut.block, 0, values..., cut.column_blocks);
}

// The same for kernels that begin with cuda::wait_for_previous.
template <class... Params, class... Values>
void launch_columns_overlapping(const char* name, int device, void* stream,
                                const StreamSizes& sizes, void (*kernel)(Params...),
                                Values... values) {
  if (sizes.tokens == 0) return;
  const ColumnCut cut = cut_columns(sizes);
  cuda::launch_overlapping(name, device, stream, kernel, cut.grid, cut.block, 0, values...,
                           cut.column_blocks);
}

// --- one block per token, for sums over d ---

inline constexpr int kMostRowThreads = 256;

// How many threads share a row: by d and the type alone, for it decides the order of sums.
inline int row_threads(const StreamSizes& sizes, int packs_of_thread) {
  const int64_t packs =
      cuda::packs_of(sizes.hidden, 16 / static_cast<int>(size_of(sizes.activation)));
  const int64_t warps = (packs + packs_of_thread * 32 - 1) / (packs_of_thread * 32);
  return static_cast<int>(std::clamp<int64_t>(warps * 32, 32, kMostRowThreads));
}

template <class... Params, class... Values>
void launch_rows(const char* name, int device, void* stream, const StreamSizes& sizes,
                 int packs_of_thread, void (*kernel)(Params...), Values... values) {
  if (sizes.tokens == 0) return;
  cuda::launch(name, device, stream, kernel, dim3(cuda::blocks(sizes.tokens)),
               dim3(static_cast<unsigned>(row_threads(sizes, packs_of_thread))), 0, values...);
}

// The same for kernels that begin with cuda::wait_for_previous.
template <class... Params, class... Values>
void launch_rows_overlapping(const char* name, int device, void* stream, const StreamSizes& sizes,
                             int packs_of_thread, void (*kernel)(Params...), Values... values) {
  if (sizes.tokens == 0) return;
  cuda::launch_overlapping(name, device, stream, kernel, dim3(cuda::blocks(sizes.tokens)),
                           dim3(static_cast<unsigned>(row_threads(sizes, packs_of_thread))), 0,
                           values...);
}

}  // namespace ehc::mhc
