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
inline constexpr int64_t kMostWarpWidth = 512;   // wider rows have a block

// --- teams ---

// The shape of a kernel: a thread holds kPacks packs (0: none, they are read again) of each of kRows
// rows at a time.
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
    body(TeamShape<true, 2, 1>{}, std::true_type{});
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
  // `room`: shared memory of a block team.
  __device__ explicit TeamSum(float (&room)[2][kTeamWarps]) : room_(room) {}

  __device__ __forceinline__ float operator()(float x) {
#pragma unroll
    for (int distance = cuda::kWarp / 2; distance > 0; distance /= 2) {
      x += __shfl_xor_sync(cuda::kAllLanes, x, distance);
    }
    if constexpr (Shape::kBlock) {
      turn_ ^= 1;  // another thread may still read the room of the last sum
      if (threadIdx.x % cuda::kWarp == 0) room_[turn_][threadIdx.x / cuda::kWarp] = x;
      __syncthreads();
      x = room_[turn_][0];
#pragma unroll
      for (int w = 1; w < kTeamWarps; ++w) x += room_[turn_][w];
    }
    return x;
  }

 private:
  float (&room_)[2][kTeamWarps];
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

// The norm of a row of x = (scale * A) * col_scale. All threads of the team take part.
template <class Shape, bool kVector>
__device__ __forceinline__ float norm_of_row(const TeamRow<Shape, kVector>& row, float scale,
                                             const float* col_scale, int64_t width,
                                             TeamSum<Shape>& team_sum) {
  const auto squares = [&](float unit) {
    float sum = 0;
    row.each(width, [&](int, int64_t column, int64_t count, const Four& a) {
      const Four col = load_four<kVector>(col_scale + column, count);
#pragma unroll
      for (int k = 0; k < kFour; ++k) {
        const float x = a.value[k] * scale * col.value[k] * unit;
        if (kVector || k < count) sum = fmaf(x, x, sum);
      }
    });
    return team_sum(sum);
  };
  return norm_of(squares(1.0f), squares);
}

}  // namespace ehc::engram
