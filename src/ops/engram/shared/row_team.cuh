// Rows of F32 whose norms are taken, on CUDA: a row belongs to a team, which is a warp or, for wide
// rows, a block of 256 threads. Thread i of a team owns the packs i, i + threads, ... of four
// columns. So the order of a sum over a row depends on its width alone, not on how many packs a
// kernel holds in registers, nor on alignment.
#pragma once

#include <type_traits>

#include "backends/cuda/sums.cuh"
#include "ops/engram/shared/sinkhorn_device.h"
#include "ops/engram/shared/table_rows.cuh"
#include "ops/engram/sinkhorn/sinkhorn_args.h"
#include "ops/engram/sinkhorn/sinkhorn_math.h"

namespace ehc::engram {

inline constexpr int kTeamThreads = 256;  // of a block, also where a team is a warp
inline constexpr int kTeamWarps = kTeamThreads / cuda::kWarp;
inline constexpr int64_t kMostWarpWidth = 512;  // wider rows have a block

// --- teams ---

// The shape of a kernel: a thread holds kPacks packs (0: none, they are read again) of each of
// kRows rows at a time.
template <bool kIsBlock, int kPacksOfRow, int kRowsAtOnce>
struct TeamShape {
  static constexpr bool kBlock = kIsBlock;
  static constexpr int kPacks = kPacksOfRow;
  static constexpr int kRows = kRowsAtOnce;
  static constexpr int kThreads = kBlock ? kTeamThreads : cuda::kWarp;
  static constexpr int kTeams = kTeamThreads / kThreads;  // of a block
};

// Calls body(shape, vector) for rows of this width. Rows that cannot be moved 16 bytes at a time
// have fewer shapes, which costs no bit.
template <class Body>
void with_team(int64_t width, bool vector, const Body& body) {
  if (width > kMostHeldWidth) {
    with_flag(vector, [&](auto is_vector) { body(TeamShape<true, 0, 1>{}, is_vector); });
  } else if (width > kMostWarpWidth) {
    if (!vector) return body(TeamShape<true, 8, 1>{}, std::false_type{});
    if (width > 2048) return body(TeamShape<true, 8, 1>{}, std::true_type{});
    body(TeamShape<true, 2, 4>{}, std::true_type{});
  } else {
    if (!vector) return body(TeamShape<false, 4, 1>{}, std::false_type{});
    if (width > 256) return body(TeamShape<false, 4, 1>{}, std::true_type{});
    if (width > 128) return body(TeamShape<false, 2, 2>{}, std::true_type{});
    body(TeamShape<false, 1, 4>{}, std::true_type{});
  }
}

inline bool is_vector_row(const void* data, int64_t stride, int64_t width, size_t size) {
  return width % kFour == 0 && are_aligned(data, stride, size, kFour * size);
}

// Sums over the threads of a team, known to all of them.
template <class Shape>
class TeamSum {
 public:
  static constexpr int kRows = Shape::kRows;
  struct Room {  // shared memory of a block team
    float of_warp[2][kRows][kTeamWarps];
  };
  __device__ explicit TeamSum(Room& room) : room_(room) {}

  // Of kCount sums at once, at most kRows.
  template <int kCount>
  __device__ __forceinline__ void operator()(float (&x)[kCount]) {
    static_assert(kCount <= kRows);
#pragma unroll
    for (int distance = cuda::kWarp / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] += __shfl_xor_sync(cuda::kAllLanes, x[i], distance);
    }
    if constexpr (Shape::kBlock) {
      turn_ ^= 1;  // another thread may still read the room of the last sum
      if (threadIdx.x % cuda::kWarp == 0) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) room_.of_warp[turn_][i][threadIdx.x / cuda::kWarp] = x[i];
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        x[i] = room_.of_warp[turn_][i][0];
#pragma unroll
        for (int w = 1; w < kTeamWarps; ++w) x[i] += room_.of_warp[turn_][i][w];
      }
    }
  }

 private:
  Room& room_;
  int turn_ = 0;
};

template <class Shape>
__device__ __forceinline__ int thread_of_team() {
  return Shape::kBlock ? threadIdx.x : threadIdx.x % cuda::kWarp;
}
template <class Shape>
__device__ __forceinline__ int team_of_block() {
  return Shape::kBlock ? 0 : threadIdx.x / cuda::kWarp;
}

// The thread's packs of a row.
template <class Shape, bool kVector>
struct TeamRow {
  static constexpr int kHeld = Shape::kPacks == 0 ? 1 : Shape::kPacks;
  const float* from = nullptr;
  Four held[kHeld];

  __device__ __forceinline__ void load(const float* row, int64_t width) {
    from = row;
#pragma unroll
    for (int p = 0; p < Shape::kPacks; ++p) {
      const int column = (p * Shape::kThreads + thread_of_team<Shape>()) * kFour;
      if (column < width) held[p] = load_four<kVector>(row + column, width - column);
    }
  }
  // body(p, column, count, four columns)
  template <class Body>
  __device__ __forceinline__ void each(int64_t width, const Body& body) const {
    if constexpr (Shape::kPacks > 0) {
#pragma unroll
      for (int p = 0; p < Shape::kPacks; ++p) {
        const int column = (p * Shape::kThreads + thread_of_team<Shape>()) * kFour;
        if (column < width) body(p, column, width - column, held[p]);
      }
    } else {
      for (int64_t column = thread_of_team<Shape>() * kFour; column < width;
           column += Shape::kThreads * kFour) {
        body(0, column, width - column, load_four<kVector>(from + column, width - column));
      }
    }
  }
};

// sum ((scale * A) * col_scale * unit)^2 over the thread's columns of a row.
template <class Shape, bool kVector>
__device__ __forceinline__ float squares_of(const TeamRow<Shape, kVector>& row, float scale,
                                            const float* col_scale, int64_t width, float unit) {
  float sum = 0;
  row.each(width, [&](int, int64_t column, int64_t count, const Four& a) {
    const Four col = load_four<kVector>(col_scale + column, count);
#pragma unroll
    for (int k = 0; k < kFour; ++k) {
      const float x = a.value[k] * scale * col.value[k] * unit;
      if (kVector || k < count) sum = fmaf(x, x, sum);
    }
  });
  return sum;
}

// The norms of rows of x = (scale * A) * col_scale, 0 for those that are not there. All threads of
// the team take part.
template <class Shape, bool kVector>
__device__ __forceinline__ void norms_of_rows(const TeamRow<Shape, kVector> (&row)[Shape::kRows],
                                              const bool (&is_there)[Shape::kRows],
                                              const float (&scale)[Shape::kRows],
                                              const float* col_scale, int64_t width,
                                              TeamSum<Shape>& team_sum,
                                              float (&norm)[Shape::kRows]) {
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i) {
    norm[i] = is_there[i] ? squares_of(row[i], scale[i], col_scale, width, 1.0f) : 0.0f;
  }
  team_sum(norm);
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i) {
    if (!is_there[i]) continue;
    norm[i] = norm_of(norm[i], [&](float unit) {
      float again[1] = {squares_of(row[i], scale[i], col_scale, width, unit)};
      team_sum(again);
      return again[0];
    });
  }
}

}  // namespace ehc::engram
