// Sums over tokens of the gradients of mixes: a partial per chunk of tokens, for split_bwd and
// head_mix_bwd.
#pragma once

#include "backends/cuda/launch.cuh"
#include "core/token_chunks.h"

namespace ehc::mhc {

inline constexpr int kChunkThreads = 768;

// The gradient of a logit and the mix that it came from.
struct MixGradient {
  float grad, mix;
};

// One block per chunk, `width` threads side by side and as many rows of them as fit; row r takes
// tokens r, r + rows, ... of the chunk, rows are added in ascending order, so the order of a sum
// depends on T and the width alone. `step.at(t, j)` does the token's work for mix j,
// `step.put_base` and `step.put_scale` take the sums of a chunk; segment s of the scales has mixes
// [step.begin_of(s), step.begin_of(s + 1)).
template <class Step>
__global__ void __launch_bounds__(kChunkThreads)
    chunk_sums(const __grid_constant__ Step step, int64_t tokens, int64_t chunk_tokens) {
  __shared__ float base[kChunkThreads], scale[kChunkThreads];
  const int width = blockDim.x;
  const int j = threadIdx.x;
  const int at = threadIdx.y * width + j;
  const int64_t chunk = blockIdx.x;
  const int64_t end = min(tokens, (chunk + 1) * chunk_tokens);
  float of_base = 0;
  float of_scale = 0;
  for (int64_t t = chunk * chunk_tokens + threadIdx.y; t < end; t += blockDim.y) {
    const MixGradient g = step.at(t, j);
    of_base += g.grad;
    of_scale = fmaf(g.grad, g.mix, of_scale);
  }
  base[at] = of_base;
  scale[at] = of_scale;
  __syncthreads();
  if (threadIdx.y == 0) {
    for (int y = 1; y < blockDim.y; ++y) {
      of_base += base[y * width + j];
      of_scale += scale[y * width + j];
    }
    step.put_base(chunk, j, of_base);
    scale[j] = of_scale;
  }
  __syncthreads();
  if (threadIdx.y != 0 || j >= Step::kSegments) return;
  float sum = 0;
  for (int k = step.begin_of(j); k < step.begin_of(j + 1); ++k) sum += scale[k];
  step.put_scale(chunk, j, sum);
}

template <class Step>
void launch_chunks(const char* name, int device, void* stream, int64_t tokens, int64_t width,
                   const Step& step) {
  if (tokens == 0) return;
  const dim3 block(static_cast<unsigned>(width),
                   static_cast<unsigned>(std::max<int64_t>(1, kChunkThreads / width)));
  cuda::launch(name, device, stream, chunk_sums<Step>, dim3(cuda::blocks(chunks_of_tokens(tokens))),
               block, 0, step, tokens, tokens_of_chunk(tokens));
}

}  // namespace ehc::mhc
