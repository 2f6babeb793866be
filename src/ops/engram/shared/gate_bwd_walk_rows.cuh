// What a walk of gate_bwd_walk.cuh is made of: how far ahead it asks for rows, where their packs
// are in shared memory, and what the threads of a block tell each other.
#pragma once

#include "backends/cuda/async_copy.cuh"
#include "ops/engram/shared/gate_bwd_rows.cuh"

namespace ehc::engram {

inline constexpr int kWalkStreams = 4;
inline constexpr int kWalkWindow = 8;  // tokens whose scalars are made together
inline constexpr int kWalkAhead = 3;   // tokens until the one whose rows are found
inline constexpr int kWalkTables = 8;  // tokens whose rows are known, half of them in use

// How a walk goes, as measured on an H200: the bytes of a processor that are on their way at once
// decide. Fewer, and it waits; more, and processors near the memory overtake the others.
struct OneBlock {
  static constexpr int kBlocks = 1;
  static constexpr int kThreads = 512;       // at most
  static constexpr int kStreamsAhead = 2;    // x and k are asked for so many streams ahead
  static constexpr int kGradStage = -1;      // v and go: before the first stream, or with stream..
  static constexpr bool kSumsAhead = false;  // whether the sums are taken a token ahead
  static constexpr bool kOnce = true;        // whether gradients leave the caches first
};
struct BlockPair {
  static constexpr int kBlocks = 2;
  static constexpr int kThreads = 512;
  static constexpr int kStreamsAhead = 3;
  static constexpr int kGradStage = 1;
  static constexpr bool kSumsAhead = true;
  static constexpr bool kOnce = false;
};

// Rows of a token: those that are read have a slot in shared memory.
enum WalkRow : int {
  kValueRow = 0,
  kGradRow = 1,
  kResidualRow = kGradRow + kWalkStreams,
  kKeyRow = kResidualRow + kWalkStreams,
  kReadRows = kKeyRow + kWalkStreams,
  kGradResidualRow = kReadRows,
  kGradKeyRow = kGradResidualRow + kWalkStreams,
  kGradValueRow = kGradKeyRow + kWalkStreams,
  kAllRows,
};

// Packs of shared memory that a block of kThreads has; those of a thread are kThreads apart.
template <class A, int kThreads>
struct WalkMemory {
  static constexpr int kQuads = kWidth<A> / 4;
  Pack* of_thread;

  __device__ __forceinline__ Pack* slot(int row) const { return of_thread + row * kThreads; }
  __device__ __forceinline__ float4* weight(int h, int quad) const {
    return reinterpret_cast<float4*>(slot(kReadRows + h * kQuads + quad));
  }
  static constexpr size_t bytes() {
    return sizeof(Pack) * (kReadRows + kWalkStreams * kQuads) * kThreads;
  }
};

// What the threads of a block share.
struct WalkShared {
  static constexpr int kPairs = kWalkWindow * kWalkStreams;  // of a token and a stream
  float4 scalars[2][kPairs];  // of a window and the next: slope_of_alpha, both pulls, alpha
  bool is_flat[2][kPairs], is_image[2][kWalkWindow];
  float statistics[4][kPairs];  // of the window after them: dot, alpha and both reciprocals
  float of_group[2][kWalkStreams][cuda::kWarp];  // sums over 32 packs of a row
  char* rows[kWalkTables][kAllRows];
};

// A thread's view of the rows of one token after the other.
struct WalkCursor {
  char* at = nullptr;
  int64_t step = 0;  // bytes between tokens

  template <class A>
  __device__ __forceinline__ void point(const A* row, int64_t token_stride) {
    at = const_cast<char*>(reinterpret_cast<const char*>(row));
    step = token_stride * static_cast<int64_t>(sizeof(A));
  }
  template <class A>
  __device__ __forceinline__ void point(const GradientRows& rows, int64_t t, int64_t h) {
    point(row_of<const A>(rows, t, h), rows.token_stride);
  }
  // Row `r` of token t.
  template <class A>
  __device__ __forceinline__ void find(const GateBackwardArgs& a, int r, int64_t t) {
    const int h = (r - kGradRow) % kWalkStreams;
    if (r == kValueRow) {
      point(value_row<A>(a.gate, t), a.gate.value_token_stride);
    } else if (r < kResidualRow) {
      point<A>(a.grad_out, t, h);
    } else if (r < kKeyRow) {
      point(residual_row<A>(a.gate, t, h), a.gate.residual_token_stride);
    } else if (r < kReadRows) {
      point(key_row<A>(a.gate, t, h), a.gate.key_token_stride);
    } else if (r < kGradKeyRow) {
      point<A>(a.grad_residual, t, h);
    } else if (r < kGradValueRow) {
      point<A>(a.grad_key, t, h);
    } else {
      point<A>(a.grad_value, t, 0);
    }
  }
};

}  // namespace ehc::engram
