// Rows of F32 whose norms are taken, on CUDA: a row belongs to a team of 8, 16 or 32 neighbours of
// a warp or, when it is wide, of all 256 threads of a block. Thread i of a team owns the packs i,
// i + threads, ... of four columns. So the order of a sum over a row depends on its width alone,
// not on how many packs a kernel holds in registers, nor on alignment.
#pragma once

#include <type_traits>

#include "backends/cuda/sums.cuh"
#include "ops/engram/shared/sinkhorn_device.h"
#include "ops/engram/shared/table_rows.cuh"
#include "ops/engram/sinkhorn/sinkhorn_args.h"
#include "ops/engram/sinkhorn/sinkhorn_math.h"

namespace ehc::engram {

inline constexpr int kTeamThreads = 256;  // of a block
inline constexpr int kTeamWarps = kTeamThreads / cuda::kWarp;

// --- teams ---

// Few threads for a narrow row, so that what is done once for a row is done for several at a time.
inline int team_threads(int64_t width) {
  if (width <= 128) return 8;
  if (width <= 256) return 16;
  return width <= 1280 ? cuda::kWarp : kTeamThreads;
}

// The threads of a team, and the packs of a row that each holds (0: none, they are read again).
template <int kThreadsOfTeam, int kPacksOfThread>
struct TeamShape {
  static constexpr int kThreads = kThreadsOfTeam;
  static constexpr int kPacks = kPacksOfThread;
  static constexpr int kHeld = kPacks == 0 ? 1 : kPacks;
  static constexpr int kTeams = kTeamThreads / kThreads;  // of a block
};

// Blocks that a processor should have at once where a kernel takes one row a team: what is on the
// way must not suffer from registers.
template <class Shape>
inline constexpr int kRowBlocks = Shape::kPacks > 4 ? 3 : 5;

// Calls body(shape, vector) for rows of this width. Rows that cannot be moved 16 bytes at a time
// have a shape less, which costs no bit.
template <class Body>
void with_team(int64_t width, bool vector, const Body& body) {
  with_flag(vector, [&](auto is_vector) {
    switch (team_threads(width)) {
      case 8:
        return body(TeamShape<8, 4>{}, is_vector);
      case 16:
        return body(TeamShape<16, 4>{}, is_vector);
      case cuda::kWarp:
        if constexpr (is_vector()) {
          if (width <= 512) return body(TeamShape<cuda::kWarp, 4>{}, is_vector);
        }
        return body(TeamShape<cuda::kWarp, 10>{}, is_vector);
      default:
        if (width <= kMostHeldWidth) return body(TeamShape<kTeamThreads, 8>{}, is_vector);
        return body(TeamShape<kTeamThreads, 0>{}, is_vector);
    }
  });
}

inline bool is_vector_row(const void* data, int64_t stride, int64_t width, size_t size) {
  return width % kFour == 0 && are_aligned(data, stride, size, kFour * size);
}

// Shared memory of a team that is a block.
struct TeamRoom {
  float of_warp[2][kTeamWarps];
};

// The team of a thread. `threads` is a power of two.
class Team {
 public:
  __device__ __forceinline__ Team(int threads, TeamRoom& room) : threads_(threads), room_(room) {}

  [[nodiscard]] __device__ __forceinline__ int thread() const {
    return static_cast<int>(threadIdx.x) & (threads_ - 1);
  }
  [[nodiscard]] __device__ __forceinline__ int index() const {
    return static_cast<int>(threadIdx.x) / threads_;
  }
  // The sum over the threads of the team, known to all of them, who all take part.
  __device__ __forceinline__ float sum(float x) {
    unsigned lanes = cuda::kAllLanes;
    if (threads_ < cuda::kWarp) {
      const int first = static_cast<int>(threadIdx.x) % cuda::kWarp - thread();
      lanes = ((1U << threads_) - 1) << first;
    }
#pragma unroll
    for (int distance = cuda::kWarp / 2; distance > 0; distance /= 2) {
      if (distance < threads_) x += __shfl_xor_sync(lanes, x, distance);
    }
    if (threads_ <= cuda::kWarp) return x;
    turn_ ^= 1;  // another thread may still read the room of the last sum
    if (threadIdx.x % cuda::kWarp == 0) room_.of_warp[turn_][threadIdx.x / cuda::kWarp] = x;
    __syncthreads();
    x = room_.of_warp[turn_][0];
#pragma unroll
    for (int w = 1; w < kTeamWarps; ++w) x += room_.of_warp[turn_][w];
    return x;
  }

 private:
  int threads_;
  TeamRoom& room_;
  int turn_ = 0;
};

// The thread's packs of a row.
template <class Shape, bool kVector>
struct TeamRow {
  const float* from = nullptr;
  Four held[Shape::kHeld];

  static __device__ __forceinline__ int column_of(int p) {
    return (p * Shape::kThreads + static_cast<int>(threadIdx.x) % Shape::kThreads) * kFour;
  }

  __device__ __forceinline__ void load(const float* row, int64_t width) {
    from = row;
#pragma unroll
    for (int p = 0; p < Shape::kPacks; ++p) {
      const int column = column_of(p);
      if (column < width) held[p] = load_four<kVector>(row + column, width - column);
    }
  }
  // body(p, column, count, four columns)
  template <class Body>
  __device__ __forceinline__ void each(int64_t width, const Body& body) const {
    if constexpr (Shape::kPacks > 0) {
#pragma unroll
      for (int p = 0; p < Shape::kPacks; ++p) {
        const int column = column_of(p);
        if (column < width) body(p, column, width - column, held[p]);
      }
    } else {
      for (int64_t column = column_of(0); column < width; column += Shape::kThreads * kFour) {
        body(0, column, width - column, load_four<kVector>(from + column, width - column));
      }
    }
  }
};

// The norm of a row of x = (scale * A) * col_scale. All threads of the team take part.
template <class Shape, bool kVector>
__device__ __forceinline__ float norm_of_row(const TeamRow<Shape, kVector>& row, float scale,
                                             const float* col_scale, int64_t width, Team& team) {
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
    return team.sum(sum);
  };
  return norm_of(squares(1.0f), squares);
}

}  // namespace ehc::engram
