// engram.hash on CUDA (sm_80+). A thread per column of a layer, neighbours have neighbouring
// columns, so the indices are written in whole sectors; it keeps the reciprocal and the offset of
// its column and the multipliers of the layer in registers and walks over tokens. Exact. Bytes per
// token: 4*Nmax read (from L1 for the other columns), 4*L*C written.
#include <algorithm>

#include "backends/cuda/launch.cuh"
#include "core/forced_grid.h"
#include "ops/engram/hash/hash_math.h"

namespace ehc::engram {

namespace {

constexpr int64_t kThreads = 256;
constexpr int kMostNgram = 8;
constexpr int64_t kMostPasses = 16;      // of a block over its tokens
constexpr int64_t kEnoughBlocks = 2048;  // then blocks take several passes

template <int kMostSlots>
__global__ void __launch_bounds__(kThreads)
    hash_kernel(const __grid_constant__ HashArgs a, int64_t columns, int64_t tokens_of_block) {
  __shared__ Divisor divisors[kThreads];
  const int64_t first_column = static_cast<int64_t>(blockIdx.z) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tokens_of_block;
  const int64_t end = min(a.tokens, first + tokens_of_block);
  for (int64_t l = blockIdx.y; l < a.layers; l += gridDim.y) {
    for (int64_t j = first_column + threadIdx.x; j - threadIdx.x < columns;
         j += static_cast<int64_t>(gridDim.z) * blockDim.x) {
      __syncthreads();
      if (threadIdx.y == 0 && j < columns) {
        const int32_t size = a.sizes[l * columns + j];
        divisors[threadIdx.x] = size > 0 ? make_divisor(size) : Divisor{0, 0, 0};
      }
      __syncthreads();
      if (j >= columns) continue;
      const Divisor by = divisors[threadIdx.x];
      const int slots = static_cast<int>(j / a.heads) + 2;
      const int64_t offset = hash_offset(a, l * columns + j);
      int64_t multiplier[kMostSlots];
#pragma unroll
      for (int k = 0; k < kMostSlots; ++k) {
        multiplier[k] = k < slots ? a.multipliers[l * (a.orders + 1) + k] : 0;
      }
#pragma unroll 2
      for (int64_t t = first + threadIdx.y; t < end; t += blockDim.y) {
        const int32_t* window = a.window + t * a.window_stride;
        uint64_t key = 0;
#pragma unroll
        for (int k = 0; k < kMostSlots; ++k) {
          if (k < slots) key = hash_step(key, __ldg(window + k), multiplier[k]);
        }
        // A size that is not positive addresses nothing: "no row", as for a masked token.
        const bool none = by.size == 0 || (a.mask != nullptr && __ldg(a.mask + t) != 0);
        store_index(a, l * a.layer_stride + t * a.token_stride + j,
                    none ? -1 : floored_remainder(key, by) + offset);
      }
    }
  }
}

}  // namespace

void hash_cuda(const HashArgs& a, int device, void* stream) {
  const int64_t columns = a.orders * a.heads;
  if (a.tokens == 0 || a.layers == 0 || columns == 0) return;
  const int64_t wide = std::min(columns, kThreads);
  const int64_t tall = std::max<int64_t>(1, kThreads / wide);
  const int64_t enough = tall * free_blocks(kEnoughBlocks);
  const int64_t passes = std::clamp<int64_t>(a.tokens / enough, 1, kMostPasses);
  const dim3 grid(cuda::blocks((a.tokens + tall * passes - 1) / (tall * passes)),
                  static_cast<unsigned>(std::min<int64_t>(a.layers, 65535)),
                  static_cast<unsigned>(std::min<int64_t>((columns + wide - 1) / wide, 65535)));
  const dim3 block(static_cast<unsigned>(wide), static_cast<unsigned>(tall));
  cuda::launch("engram.hash", device, stream,
               a.orders <= 3 ? &hash_kernel<4> : &hash_kernel<kMostNgram>, grid, block, 0, a,
               columns, tall * passes);
}

}  // namespace ehc::engram
