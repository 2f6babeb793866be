// engram.hash on CUDA (sm_80+). One thread per (token, column) of a layer, columns fastest, so the
// indices are written in whole sectors; a block first makes the reciprocals of its columns in
// shared memory. Exact. Bytes per token: 4*Nmax read (from L2 for the other columns), 4*L*C
// written.
#include <algorithm>

#include "backends/cuda/launch.cuh"
#include "ops/engram/hash/hash_math.h"

namespace ehc::engram {

namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 256;     // columns whose reciprocals a block holds at a time
constexpr int64_t kPairs = 2048;  // (token, column) pairs of a block

__global__ void hash_kernel(HashArgs a, int64_t columns, int64_t tokens_per_block) {
  __shared__ Divisor divisors[kColumns];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tokens_per_block;
  const int64_t end = min(a.tokens, first + tokens_per_block);
  for (int64_t l = blockIdx.y; l < a.layers; l += gridDim.y) {
    const int64_t* multipliers = a.multipliers + l * (a.orders + 1);
    for (int64_t begin = 0; begin < columns; begin += kColumns) {
      const int64_t width = min(static_cast<int64_t>(kColumns), columns - begin);
      const int64_t base = l * columns + begin;
      __syncthreads();
      for (int64_t j = threadIdx.x; j < width; j += kThreads) {
        const int32_t size = a.sizes[base + j];
        divisors[j] = size > 0 ? make_divisor(size) : Divisor{0, 0, 0};
      }
      __syncthreads();
      for (int64_t pair = threadIdx.x; pair < (end - first) * width; pair += kThreads) {
        const int64_t t = first + pair / width;
        const int64_t j = pair % width;
        const Divisor by = divisors[j];
        const int64_t order = (begin + j) / a.heads;
        const int32_t* window = a.window + t * a.window_stride;
        uint64_t key = 0;
        for (int64_t k = 0; k <= order + 1; ++k) key = hash_step(key, window[k], multipliers[k]);
        // A size that is not positive addresses nothing: "no row", as for a masked token.
        const bool none = by.size == 0 || (a.mask != nullptr && a.mask[t] != 0);
        store_index(a, l * a.layer_stride + t * a.token_stride + begin + j,
                    none ? -1 : floored_remainder(key, by) + hash_offset(a, base + j));
      }
    }
  }
}

}  // namespace

void hash_cuda(const HashArgs& a, int device, void* stream) {
  const int64_t columns = a.orders * a.heads;
  if (a.tokens == 0 || a.layers == 0 || columns == 0) return;
  const int64_t tokens_per_block =
      std::max<int64_t>(1, kPairs / std::min<int64_t>(columns, kColumns));
  const dim3 grid(cuda::blocks((a.tokens + tokens_per_block - 1) / tokens_per_block),
                  static_cast<unsigned>(std::min<int64_t>(a.layers, 65535)));
  cuda::launch("engram.hash", device, stream, hash_kernel, grid, dim3(kThreads), 0, a, columns,
               tokens_per_block);
}

}  // namespace ehc::engram
