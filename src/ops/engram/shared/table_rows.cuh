// Rows of tables as the CUDA kernels move them, four or eight columns at a time, and how rows are
// cut into blocks.
#pragma once

#include <algorithm>
#include <type_traits>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/pack.cuh"

namespace ehc::engram {

using cuda::kWidth;
using cuda::Pack;

inline constexpr int kEight = 8;

// Eight columns of storage type A, of which the first `count` exist; the others are +0.
template <class A>
struct EightOf {
  static constexpr int kPacks = kEight / kWidth<A>;
  Pack pack[kPacks] = {};

  template <bool kVector>
  __device__ __forceinline__ void load(const A* from, int64_t count) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int64_t at = p * kWidth<A>;
      if constexpr (kVector) {
        pack[p] = cuda::load_pack<true>(from + at, count);
      } else {
        pack[p] = cuda::load_pack<false>(from + at, count - at);
      }
    }
  }
  template <bool kVector>
  __device__ __forceinline__ void store(A* to, int64_t count) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int64_t at = p * kWidth<A>;
      cuda::store_pack<kVector>(to + at, pack[p], count - at);
    }
  }
  // Column k, known to the compiler once its loop is unrolled.
  __device__ __forceinline__ float operator[](int k) const {
    return cuda::column<A>(pack[k / kWidth<A>], k % kWidth<A>);
  }
  // From value(0) ... value(7), each rounded once.
  template <class Value>
  __device__ __forceinline__ static EightOf of(const Value& value) {
    EightOf x;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      x.pack[p] = cuda::make_pack<A>([&](int k) { return value(p * kWidth<A> + k); });
    }
    return x;
  }
};

inline constexpr int kFour = 4;

// Four columns as floats. Rows of 16-bit types move them 8 bytes at a time.
struct Four {
  float value[kFour] = {};
};

template <bool kVector, class W>
__device__ __forceinline__ Four load_four(const W* from, int64_t count) {
  Four x;
  if constexpr (sizeof(W) == 4) {
    const Pack pack = cuda::load_pack<kVector>(from, count);
#pragma unroll
    for (int k = 0; k < kFour; ++k) x.value[k] = __uint_as_float(pack.word[k]);
  } else if constexpr (kVector) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    const Pack pack = {words.x, words.y, 0, 0};
#pragma unroll
    for (int k = 0; k < kFour; ++k) x.value[k] = cuda::column<W>(pack, k);
  } else {
    Pack pack{};
#pragma unroll
    for (int k = 0; k < kFour; ++k) {
      if (k < count) pack.word[k / 2] |= uint32_t{from[k].bits} << (k % 2 * 16);
    }
#pragma unroll
    for (int k = 0; k < kFour; ++k) x.value[k] = cuda::column<W>(pack, k);
  }
  return x;
}

template <bool kVector, class W>
__device__ __forceinline__ void store_four(W* to, const Four& x, int64_t count) {
  if constexpr (sizeof(W) == 4) {
    cuda::store_pack<kVector>(to, cuda::make_pack<float>([&](int k) { return x.value[k]; }), count);
  } else {
    const uint2 words = {cuda::round_two<W>(x.value[0], x.value[1]),
                         cuda::round_two<W>(x.value[2], x.value[3])};
    if constexpr (kVector) {
      *reinterpret_cast<uint2*>(to) = words;
    } else {
#pragma unroll
      for (int k = 0; k < kFour; ++k) {
        const uint32_t word = k < 2 ? words.x : words.y;
        if (k < count) to[k].bits = static_cast<uint16_t>(word >> (k % 2 * 16));
      }
    }
  }
}

// Do these addresses and row strides, in elements of `size` bytes, keep every `border` bytes of a
// row on a border?
inline bool are_aligned(const void* data, int64_t stride, size_t size, size_t border = 16) {
  return reinterpret_cast<uintptr_t>(data) % border == 0 &&
         static_cast<uint64_t>(stride) * size % border == 0;
}

// Calls body(w) with a value of the storage type of a weight or state, bf16 or f32.
template <class Body>
void with_weight(DType type, const Body& body) {
  if (type == DType::f32) {
    body(float{});
  } else {
    body(cuda::Bf16{});
  }
}

template <class Body>
void with_flag(bool flag, const Body& body) {
  if (flag) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

// Blocks of `tall` rows by `wide` threads, each of which owns `columns` columns of every row that
// it takes.
struct RowCut {
  int64_t column_blocks;  // blocks side by side in a row
  dim3 grid, block;
};

inline RowCut cut_rows(int64_t rows, int64_t width, int columns, int rows_of_thread) {
  constexpr int64_t kThreads = 256;
  const int64_t packs = cuda::packs_of(width, columns);
  const int64_t column_blocks = (packs + kThreads - 1) / kThreads;
  int64_t wide = (packs + column_blocks - 1) / column_blocks;
  if (column_blocks > 1) wide = (wide + 31) / 32 * 32;
  const int64_t least = (rows + rows_of_thread - 1) / rows_of_thread;
  const int64_t tall = std::min(std::max<int64_t>(1, kThreads / wide), least);
  const int64_t row_blocks = (rows + tall * rows_of_thread - 1) / (tall * rows_of_thread);
  return {column_blocks, dim3(cuda::blocks(row_blocks * column_blocks)),
          dim3(static_cast<unsigned>(wide), static_cast<unsigned>(tall))};
}

// The thread's columns and first row; its rows are blockDim.y apart.
struct RowPlace {
  int64_t row, column;

  __device__ __forceinline__ RowPlace(int64_t column_blocks, int columns, int rows_of_thread) {
    const auto cut = static_cast<unsigned>(column_blocks);
    row = static_cast<int64_t>(blockIdx.x / cut) * blockDim.y * rows_of_thread + threadIdx.y;
    column = (static_cast<int64_t>(blockIdx.x % cut) * blockDim.x + threadIdx.x) * columns;
  }
};

template <class... Params, class... Values>
void launch_rows(const char* name, int device, void* stream, const RowCut& cut,
                 void (*kernel)(Params...), Values... values) {
  cuda::launch(name, device, stream, kernel, cut.grid, cut.block, 0, values..., cut.column_blocks);
}

}  // namespace ehc::engram
