// The matrix product on tensor cores (sm_80+): sum over k of x[i,k] y[j,k], for operands that lie
// along k or across it.
//
// A block makes a tile of sums, its operands go through two buffers of shared memory, and what
// comes next is on its way in registers meanwhile. bf16 and f16 are exact factors; fp32 is cut
// into three bf16 parts, of whose nine products the six largest count. Tensor cores cut off what
// they add, so sums start from zero every 64 values of k and are then added in fp32. A sum's order
// depends on the type and on how many k there are.
#pragma once

#include "backends/cuda/launch.cuh"
#include "backends/cuda/mma.cuh"

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

// --- a tile of an operand in shared memory ---

template <class A>
struct ProductShape {
  static constexpr bool kIsF32 = sizeof(A) == 4;
  static constexpr int kParts = kIsF32 ? 3 : 1;
  static constexpr int kTile = kIsF32 ? 64 : 128;  // rows and columns of a block
  static constexpr int kDepth = kIsF32 ? 16 : 32;  // k at a time
  static constexpr int kThreads = 256;
  static constexpr int kWarpsDown = 2, kWarpsAcross = 4;
  static constexpr int kRowTiles = kTile / kWarpsDown / 16;
  static constexpr int kColumnTiles = kTile / kWarpsAcross / 8;
  static constexpr int kPromoted = 64 / kDepth;  // steps until sums are added in fp32
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

  // The packs of a thread, of the tile whose first row is `first` and first depth `k`.
  template <bool kVector>
  __device__ static void load(const Operand& x, int64_t first, int64_t k,
                              Pack (&packs)[kOfThread]) {
    const int64_t outer = kAcross ? k : first;
    const int64_t inner = kAcross ? first : k;
#pragma unroll
    for (int p = 0; p < kOfThread; ++p) {
      const int at = p * Shape::kThreads + static_cast<int>(threadIdx.x);
      packs[p] =
          load_pack_of<kVector, A>(x, outer + at / kRowPacks, inner + at % kRowPacks * kWidth<A>);
    }
  }
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
                   int64_t rows, int64_t columns, int64_t depth, int64_t row_tiles,
                   const __grid_constant__ Store store) {
  using Shape = ProductShape<A>;
  using TileX = OperandTile<A, kXAcross>;
  using TileY = OperandTile<A, kYAcross>;
  constexpr int kRows = Shape::kRowTiles;
  constexpr int kColumns = Shape::kColumnTiles;
  __shared__ TileX tile_x[2];
  __shared__ TileY tile_y[2];
  const int64_t first_row = blockIdx.x % row_tiles * Shape::kTile;
  const int64_t first_column = blockIdx.x / row_tiles * Shape::kTile;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp % Shape::kWarpsDown * kRows * 16;
  const int warp_column = warp / Shape::kWarpsDown * kColumns * 8;
  const int64_t steps = (depth + Shape::kDepth - 1) / Shape::kDepth;

  Pack next_x[TileX::kOfThread], next_y[TileY::kOfThread];
  const auto load = [&](int64_t step) {
    TileX::template load<kVector>(x, first_row, step * Shape::kDepth, next_x);
    TileY::template load<kVector>(y, first_column, step * Shape::kDepth, next_y);
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
  if (steps > 0) {
    load(0);
    tile_x[0].store(next_x);
    tile_y[0].store(next_y);
  }
  __syncthreads();
  for (int64_t step = 0; step < steps; ++step) {
    if (step + 1 < steps) load(step + 1);
    const TileX& of_x = tile_x[step % 2];
    const TileY& of_y = tile_y[step % 2];
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
    if (step + 1 < steps) {
      tile_x[(step + 1) % 2].store(next_x);
      tile_y[(step + 1) % 2].store(next_y);
    }
    __syncthreads();
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
  const auto start = [&](auto kernel) {
    launch(name, device, stream, kernel, dim3(blocks(tiles)), dim3(ProductShape<A>::kThreads), 0, x,
           y, rows, columns, depth, row_tiles, store);
  };
  if (x.has_packs(kWidth<A>) && y.has_packs(kWidth<A>)) {
    start(&product_kernel<A, kXAcross, kYAcross, true, Store>);
  } else {
    start(&product_kernel<A, kXAcross, kYAcross, false, Store>);
  }
}

}  // namespace ehc::cuda
