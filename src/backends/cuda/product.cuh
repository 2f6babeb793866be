// The matrix product on tensor cores (sm_80+): sum over k of x[i,k] y[j,k], for operands that lie
// along k or across it.
//
// A block makes a tile of sums. Its operands go through buffers of shared memory, which are filled
// some steps ahead; what must be cut into parts, or does not lie on borders of 16 bytes, goes
// through registers a step ahead. bf16 and f16 are exact factors; fp32 is cut
// into three bf16 parts, of whose nine products the six largest count. Tensor cores cut off what
// they add, so sums start from zero every 64 values of k and are then added in fp32. A sum's order
// depends on the type and on how many k there are.
#pragma once

#include <algorithm>

#include "backends/cuda/async_copy.cuh"
#include "backends/cuda/large_shared.cuh"
#include "backends/cuda/mma.cuh"
#include "core/float_formats.h"

namespace ehc::cuda {

// A matrix whose inner index runs through memory. Either index may be cut into blocks of `count`
// that are further apart.
struct Operand {
  const void* data = nullptr;
  int64_t outer = 0, inner = 0;  // sizes
  int64_t outer_count = 0, outer_stride = 0, outer_block = 0;
  int64_t inner_count = 0, inner_block = 0;

  __device__ __forceinline__ int64_t offset_of_outer(int64_t i) const {
    if (outer_count >= outer) return i * outer_stride;
    const auto at = static_cast<uint32_t>(i), count = static_cast<uint32_t>(outer_count);
    return at / count * outer_block + at % count * outer_stride;
  }
  __device__ __forceinline__ int64_t offset_of_inner(int64_t i) const {
    if (inner_count >= inner) return i;
    const auto at = static_cast<uint32_t>(i), count = static_cast<uint32_t>(inner_count);
    return at / count * inner_block + at % count;
  }
  // The same where blocks turn out to follow each other.
  [[nodiscard]] Operand flattened() const {
    Operand x = *this;
    if (outer_block == outer_count * outer_stride) x.outer_count = outer;
    if (inner_block == inner_count) x.inner_count = inner;
    return x;
  }
  // Do packs of `width` elements lie on borders of 16 bytes, all in one block?
  [[nodiscard]] bool has_packs(int width) const {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && outer_stride % width == 0 &&
           outer_block % width == 0 && inner_block % width == 0 && inner_count % width == 0 &&
           inner % width == 0;
  }
};

template <bool kVector, class A>
__device__ __forceinline__ Pack load_pack_of(const Operand& x, int64_t outer, int64_t inner) {
  if (outer >= x.outer || inner >= x.inner) return {};
  const A* row = static_cast<const A*>(x.data) + x.offset_of_outer(outer);
  if constexpr (kVector) return load_pack<true>(row + x.offset_of_inner(inner), kWidth<A>);
  constexpr int kOfWord = 4 / static_cast<int>(sizeof(A));
  Pack pack{};
#pragma unroll
  for (int k = 0; k < kWidth<A>; ++k) {
    if (inner + k >= x.inner) continue;
    pack.word[k / kOfWord] |= bits_of(row[x.offset_of_inner(inner + k)]) << (k % kOfWord * 16);
  }
  return pack;
}

// Rounded once; in one access where they lie on a border of two elements.
__device__ __forceinline__ void store_two(void* data, DType type, int64_t at, float first,
                                          float second) {
  const auto address = reinterpret_cast<uintptr_t>(data) + at * (type == DType::f32 ? 4 : 2);
  if (type == DType::f32 || address % 4 != 0) {
    store_float(data, type, at, first);
    store_float(data, type, at + 1, second);
    return;
  }
  *reinterpret_cast<uint32_t*>(address) =
      type == DType::f16 ? round_two<F16>(first, second) : round_two<Bf16>(first, second);
}

// --- a tile of an operand in shared memory ---

template <class A>
struct ProductShape {
  static constexpr bool kIsF32 = sizeof(A) == 4;
  static constexpr int kParts = kIsF32 ? 3 : 1;
  static constexpr int kTile = kIsF32 ? 64 : 128;  // rows and columns of a block
  static constexpr int kDepth = kIsF32 ? 16 : 64;  // k at a time
  static constexpr int kWarpsDown = kIsF32 ? 2 : 4, kWarpsAcross = 4;
  static constexpr int kThreads = kWarpsDown * kWarpsAcross * 32;
  static constexpr int kRowTiles = kTile / kWarpsDown / 16;
  static constexpr int kColumnTiles = kTile / kWarpsAcross / 8;
  static constexpr int kPromoted = 64 / kDepth;  // steps until sums are added in fp32
  // Can packs be copied as they are?
  template <bool kVector>
  static constexpr bool kCopies = kVector && !kIsF32;
};

// kAcross: k is the outer index. Rows are padded so that matrices are read without conflicts.
template <class A, bool kAcross>
struct OperandTile {
  using Shape = ProductShape<A>;
  static constexpr int kInner = kAcross ? Shape::kTile : Shape::kDepth;
  static constexpr int kOuter = kAcross ? Shape::kDepth : Shape::kTile;
  static constexpr int kPitch = kInner + 8;
  static constexpr int kRowPacks = kInner / kWidth<A>;
  static constexpr int kOfThread = kOuter * kRowPacks / Shape::kThreads;
  static_assert(kOuter * kRowPacks % Shape::kThreads == 0);

  alignas(16) uint16_t element[Shape::kParts][kOuter][kPitch];

  // Where a thread's packs come from: of the two indices only k moves.
  template <bool kVector>
  class Source {
   public:
    __device__ __forceinline__ Source(const Operand& x, int64_t first) : x_(x) {
#pragma unroll
      for (int p = 0; p < kOfThread; ++p) {
        const int at = p * Shape::kThreads + static_cast<int>(threadIdx.x);
        const int row = at / kRowPacks;
        const int column = at % kRowPacks * kWidth<A>;
        rest_[p] = first + (kAcross ? column : row);
        depth_[p] = kAcross ? row : column;
        exists_[p] = rest_[p] < (kAcross ? x.inner : x.outer);
        if (!exists_[p]) rest_[p] = 0;
        from_[p] = static_cast<const A*>(x.data) +
                   (kAcross ? x.offset_of_inner(rest_[p]) : x.offset_of_outer(rest_[p]));
      }
    }
    // Through registers.
    __device__ __forceinline__ void load(int64_t k, Pack (&packs)[kOfThread]) const {
#pragma unroll
      for (int p = 0; p < kOfThread; ++p) {
        packs[p] = {};
        if (!exists_[p]) continue;
        const int64_t at = k + depth_[p];
        packs[p] = kAcross ? load_pack_of<kVector, A>(x_, at, rest_[p])
                           : load_pack_of<kVector, A>(x_, rest_[p], at);
      }
    }
    __device__ __forceinline__ void copy(int64_t k, OperandTile& to) const {
#pragma unroll
      for (int p = 0; p < kOfThread; ++p) {
        const int at = p * Shape::kThreads + static_cast<int>(threadIdx.x);
        const int64_t depth = k + depth_[p];
        const bool exists = exists_[p] && depth < (kAcross ? x_.outer : x_.inner);
        const int64_t offset = kAcross ? x_.offset_of_outer(depth) : x_.offset_of_inner(depth);
        start_copy(&to.element[0][at / kRowPacks][at % kRowPacks * kWidth<A>],
                   exists ? from_[p] + offset : x_.data, exists);
      }
    }

   private:
    const Operand& x_;
    const A* from_[kOfThread];
    int64_t rest_[kOfThread];
    int depth_[kOfThread];
    bool exists_[kOfThread];
  };
  __device__ void store(const Pack (&packs)[kOfThread]) {
#pragma unroll
    for (int p = 0; p < kOfThread; ++p) {
      const int at = p * Shape::kThreads + static_cast<int>(threadIdx.x);
      const int row = at / kRowPacks;
      const int column = at % kRowPacks * kWidth<A>;
      if constexpr (!Shape::kIsF32) {
        *reinterpret_cast<Pack*>(&element[0][row][column]) = packs[p];
      } else {
        uint32_t part[4][3];
#pragma unroll
        for (int k = 0; k < 4; ++k) parts_of(__uint_as_float(packs[p].word[k]), part[k]);
#pragma unroll
        for (int i = 0; i < 3; ++i) {
          *reinterpret_cast<uint2*>(&element[i][row][column]) = {
              side_by_side(part[0][i], part[1][i]), side_by_side(part[2][i], part[3][i])};
        }
      }
    }
  }
  // Factors for 16 rows from `row` on and depths from `k` on, as x of multiply_bf16 wants them.
  __device__ void rows(int part, int row, int k, uint32_t (&x)[4]) const {
    const int lane = threadIdx.x % 32;
    if constexpr (kAcross) {
      load_matrices<true>(&element[part][k + lane / 16 * 8 + lane % 8][row + lane / 8 % 2 * 8], x);
    } else {
      load_matrices<false>(&element[part][row + lane % 16][k + lane / 16 * 8], x);
    }
  }
  // The same as y, two of eight rows each.
  __device__ void columns(int part, int row, int k, uint32_t (&y)[4]) const {
    const int lane = threadIdx.x % 32;
    if constexpr (kAcross) {
      load_matrices<true>(&element[part][k + lane % 16][row + lane / 16 * 8], y);
    } else {
      load_matrices<false>(&element[part][row + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * 8], y);
    }
  }
};

// --- the product ---

template <class A>
__device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&x)[4], uint32_t y0,
                                         uint32_t y1) {
  if constexpr (std::is_same_v<A, F16>) {
    multiply_f16(sum, x[0], x[1], x[2], x[3], y0, y1);
  } else {
    multiply_bf16(sum, x[0], x[1], x[2], x[3], y0, y1);
  }
}

// `store(i, j, a, b)` gets the sums of (i, j) and (i, j + 1) for all even j; the latter may not
// exist.
template <class A, bool kXAcross, bool kYAcross, bool kVector, class Store>
__global__ void __launch_bounds__(ProductShape<A>::kThreads)
    product_kernel(const __grid_constant__ Operand x, const __grid_constant__ Operand y,
                   int64_t rows, int64_t columns, int64_t depth, int64_t row_tiles, int buffers,
                   const __grid_constant__ Store store) {
  using Shape = ProductShape<A>;
  using TileX = OperandTile<A, kXAcross>;
  using TileY = OperandTile<A, kYAcross>;
  constexpr int kRows = Shape::kRowTiles;
  constexpr int kColumns = Shape::kColumnTiles;
  constexpr bool kCopies = Shape::template kCopies<kVector>;
  extern __shared__ float4 shared[];
  TileX* tile_x = reinterpret_cast<TileX*>(shared);
  TileY* tile_y = reinterpret_cast<TileY*>(tile_x + buffers);
  const int64_t first_row = blockIdx.x % row_tiles * Shape::kTile;
  const int64_t first_column = blockIdx.x / row_tiles * Shape::kTile;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp % Shape::kWarpsDown * kRows * 16;
  const int warp_column = warp / Shape::kWarpsDown * kColumns * 8;
  const int64_t steps = (depth + Shape::kDepth - 1) / Shape::kDepth;

  const typename TileX::template Source<kVector> source_x(x, first_row);
  const typename TileY::template Source<kVector> source_y(y, first_column);
  Pack next_x[kCopies ? 1 : TileX::kOfThread], next_y[kCopies ? 1 : TileY::kOfThread];
  const auto load = [&](int64_t step) {
    if constexpr (!kCopies) {
      source_x.load(step * Shape::kDepth, next_x);
      source_y.load(step * Shape::kDepth, next_y);
    }
  };
  const auto keep = [&](int buffer) {
    if constexpr (!kCopies) {
      tile_x[buffer].store(next_x);
      tile_y[buffer].store(next_y);
    }
  };
  const auto copy = [&](int64_t step, int buffer) {
    if (step < steps) {
      source_x.copy(step * Shape::kDepth, tile_x[buffer]);
      source_y.copy(step * Shape::kDepth, tile_y[buffer]);
    }
    commit_copies();
  };
  float sum[kRows][kColumns][4] = {};
  float top[kRows][kColumns][4] = {};
  float rest[Shape::kIsF32 ? kRows : 1][kColumns][4] = {};  // of products of lesser parts
  const auto promote = [&] {
#pragma unroll
    for (int i = 0; i < kRows * kColumns * 4; ++i) {
      float& of_top = top[i / (kColumns * 4)][i / 4 % kColumns][i % 4];
      float more = of_top;
      if constexpr (Shape::kIsF32) {
        // An infinity makes the lesser parts NaN.
        float& of_rest = rest[i / (kColumns * 4)][i / 4 % kColumns][i % 4];
        if (const float both = more + of_rest; both == both) more = both;
        of_rest = 0;
      }
      sum[i / (kColumns * 4)][i / 4 % kColumns][i % 4] += more;
      of_top = 0;
    }
  };
  if constexpr (kCopies) {
    for (int step = 0; step < buffers - 1; ++step) copy(step, step);
  } else if (steps > 0) {
    load(0);
    keep(0);
  }
  int buffer = 0;
  for (int64_t step = 0; step < steps; ++step, buffer = buffer + 1 == buffers ? 0 : buffer + 1) {
    if constexpr (kCopies) wait_for_buffer(buffers);
    __syncthreads();  // this step is there, and the one before it used up
    if constexpr (kCopies) {
      copy(step + buffers - 1, buffer == 0 ? buffers - 1 : buffer - 1);
    } else if (step + 1 < steps) {
      load(step + 1);
    }
    const TileX& of_x = tile_x[buffer];
    const TileY& of_y = tile_y[buffer];
#pragma unroll
    for (int k = 0; k < Shape::kDepth; k += 16) {
      uint32_t a[Shape::kParts][kRows][4], b[Shape::kParts][kColumns / 2][4];
#pragma unroll
      for (int p = 0; p < Shape::kParts; ++p) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) of_x.rows(p, warp_row + i * 16, k, a[p][i]);
#pragma unroll
        for (int j = 0; j < kColumns / 2; ++j) of_y.columns(p, warp_column + j * 16, k, b[p][j]);
      }
      const auto add_product = [&](auto& to, int of_a, int of_b) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            multiply<A>(to[i][j], a[of_a][i], b[of_b][j / 2][j % 2 * 2],
                        b[of_b][j / 2][j % 2 * 2 + 1]);
          }
        }
      };
      add_product(top, 0, 0);
      if constexpr (Shape::kIsF32) {
        add_product(rest, 0, 1);
        add_product(rest, 1, 0);
        add_product(rest, 0, 2);
        add_product(rest, 1, 1);
        add_product(rest, 2, 0);
      }
    }
    if ((step + 1) % Shape::kPromoted == 0) promote();
    if (!kCopies && step + 1 < steps) keep(1 - buffer);
  }
  promote();
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = first_row + warp_row + i * 16 + half * 8 + lane / 4;
        const int64_t column = first_column + warp_column + j * 8 + lane % 4 * 2;
        if (row < rows && column < columns) {
          store(row, column, sum[i][j][half * 2], sum[i][j][half * 2 + 1]);
        }
      }
    }
  }
}

// kXAcross, kYAcross: k is the outer index of the operand.
template <class A, bool kXAcross, bool kYAcross, class Store>
void launch_product(const char* name, int device, void* stream, const Operand& x, const Operand& y,
                    const Store& store) {
  constexpr int64_t kTile = ProductShape<A>::kTile;
  const int64_t rows = kXAcross ? x.inner : x.outer;
  const int64_t depth = kXAcross ? x.outer : x.inner;
  const int64_t columns = kYAcross ? y.inner : y.outer;
  const int64_t row_tiles = (rows + kTile - 1) / kTile;
  const int64_t tiles = row_tiles * ((columns + kTile - 1) / kTile);
  if (tiles == 0) return;
  const Operand operands[] = {x.flattened(), y.flattened()};
  const auto start = [&](auto kernel, auto vector) {
    constexpr size_t kOfBuffer =
        sizeof(OperandTile<A, kXAcross>) + sizeof(OperandTile<A, kYAcross>);
    constexpr bool kCopies = ProductShape<A>::template kCopies<vector()>;
    const auto fit = static_cast<int>(most_shared_bytes(name, device) / kOfBuffer);
    const int buffers = kCopies ? std::clamp(fit, 2, 4) : 2;
    launch_large(name, device, stream, kernel, dim3(blocks(tiles)), dim3(ProductShape<A>::kThreads),
                 kOfBuffer * static_cast<size_t>(buffers), operands[0], operands[1], rows, columns,
                 depth, row_tiles, buffers, store);
  };
  if (operands[0].has_packs(kWidth<A>) && operands[1].has_packs(kWidth<A>)) {
    start(&product_kernel<A, kXAcross, kYAcross, true, Store>, std::true_type{});
  } else {
    start(&product_kernel<A, kXAcross, kYAcross, false, Store>, std::false_type{});
  }
}

}  // namespace ehc::cuda
