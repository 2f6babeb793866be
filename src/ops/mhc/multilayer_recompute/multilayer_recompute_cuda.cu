// mhc.multilayer_recompute on CUDA (sm_80+).
//
//   layer_input_l = round(sum_i pre_l,i x_i), then x'_o = round(c_l,o y_l + sum_i a_l,io x_i) is
//   the x of the next layer; x A[T,n,d]; layer_input, y A[T,d]; pre, c F32[T,n]; a F32[T,n,n]
//
// Bytes a token in 16-bit types, Ll inputs and Lp posts: 2nd + Ll(4n+2d) + Lp(2d+4n+4n^2+2nd).
// Algorithm: columns are independent, so a thread takes 16 bytes of columns of a token through all
// layers with its streams in registers; y of the next layers is on its way meanwhile. A block
// brings the coefficients of its tokens into shared memory first. Most bytes are written, which
// memory does slower than copying: the writes go past the caches.
// The layers come as a kernel argument. Class E: the steps are those of pre_apply and post, and
// each residual is rounded before the next layer reads it.
#include "ops/mhc/multilayer_recompute/multilayer_recompute_args.h"
#include "ops/mhc/post/post_math.h"
#include "ops/mhc/pre_apply/pre_apply_math.h"
#include "ops/mhc/shared/stream_rows.cuh"

namespace ehc::mhc {

namespace {

struct Layers {
  RecomputeLayer layer[kRecomputedTogether];
};

// Coefficients of a token and layer side by side: pre, post, comb.
template <int kStreams>
__host__ __device__ __forceinline__ int coefficients_of_layer(int64_t streams) {
  const int n = kStreams == 0 ? static_cast<int>(streams) : kStreams;
  return n * (n + 2);
}

// Line 0 of them is pre, 1 post, the others are those of comb; null where a layer has none.
__device__ __forceinline__ const float* coefficient_line(const RecomputeLayer& layer, int64_t t,
                                                         int line) {
  if (line == 0) return layer.pre.data + t * layer.pre.token_stride;
  if (!layer.has_post) return nullptr;
  if (line == 1) return layer.post.data + t * layer.post.token_stride;
  return layer.comb.data + t * layer.comb.token_stride + (line - 2) * layer.comb.row_stride;
}

// Of a layer, in shared memory; four streams' begin on borders of 16 bytes and are read at once.
template <int kStreams>
class LayerCoefficients {
 public:
  __device__ __forceinline__ LayerCoefficients(const float* from, int n) : from_(from), n_(n) {
    if constexpr (kAtOnce) {
#pragma unroll
      for (int q = 0; q < kCount; q += 4) {
        const float4 v = *reinterpret_cast<const float4*>(from + q);
        value_[q] = v.x, value_[q + 1] = v.y, value_[q + 2] = v.z, value_[q + 3] = v.w;
      }
    }
  }
  __device__ __forceinline__ float pre(int64_t i) const { return at(i); }
  __device__ __forceinline__ float post(int64_t o) const { return at(n_ + o); }
  __device__ __forceinline__ float comb(int64_t i, int64_t o) const { return at((2 + i) * n_ + o); }

 private:
  static constexpr bool kAtOnce = kStreams == 4;
  static constexpr int kCount = kAtOnce ? 24 : 1;

  __device__ __forceinline__ float at(int64_t j) const {
    if constexpr (kAtOnce) {
      return value_[j];
    } else {
      return from_[j];
    }
  }

  float value_[kCount];
  const float* from_;
  int n_;
};

template <int kStreams>
inline constexpr int kAhead = kStreams == 4 ? 4 : 2;  // layers

template <class A, int kStreams, bool kVector>
__global__ void __launch_bounds__(kMostColumnThreads, 2)
    recompute(const __grid_constant__ StreamSizes sizes,
              const __grid_constant__ StreamRows residual, const __grid_constant__ Layers layers,
              int layer_count, int64_t column_blocks) {
  extern __shared__ float4 room[];
  const Place at = Place::of_thread<A>(sizes, column_blocks);
  const int n = count_of<kStreams>(sizes.streams);
  const auto read_y = [&](int l) {
    const RecomputeLayer& layer = layers.layer[l];
    if (l >= layer_count || !layer.has_post || at.count <= 0) return Pack{};
    return cuda::load_pack<kVector>(row_of<const A>(layer.layer_output, at.token) + at.column,
                                    at.count);
  };
  Pack x[kRoom<kStreams>], y[kAhead<kStreams>];
  if (at.count > 0) {
    load_streams<kStreams, kVector, A>(residual, at.token, at.column, at.count, n, x);
  }
#pragma unroll
  for (int l = 0; l < kAhead<kStreams>; ++l) y[l] = read_y(l);
  const int of_layer = coefficients_of_layer<kStreams>(n);
  float* of_token =
      reinterpret_cast<float*>(room) + static_cast<int>(threadIdx.y) * layer_count * of_layer;
  if (at.token < sizes.tokens) {
    for (int i = threadIdx.x; i < layer_count * (n + 2); i += blockDim.x) {
      const float* from = coefficient_line(layers.layer[i / (n + 2)], at.token, i % (n + 2));
      if (from == nullptr) continue;
      float line[kRoom<kStreams>];
      load_line<kStreams, kVector>(from, n, line);
      each_stream(n, [&](int k) { of_token[i * n + k] = line[k]; });
    }
  }
  __syncthreads();
  if (at.count <= 0) return;
  for (int first = 0; first < layer_count; first += kAhead<kStreams>) {
#pragma unroll
    for (int j = 0; j < kAhead<kStreams>; ++j) {
      const int l = first + j;
      if (l >= layer_count) return;
      const RecomputeLayer& layer = layers.layer[l];
      const LayerCoefficients<kStreams> with(of_token + l * of_layer, n);
      const Pack of_layer_output = y[j];
      y[j] = read_y(l + kAhead<kStreams>);
      const Pack input = cuda::make_pack<A>([&](int k) {
        return pre_apply_column<float>([&](int64_t i) { return with.pre(i); }, n,
                                       [&](int64_t i) { return column<A>(x[i], k); });
      });
      cuda::store_pack_once<kVector>(row_of<A>(layer.layer_input, at.token) + at.column, input,
                                     at.count);
      if (!layer.has_post) return;
      Pack made[kRoom<kStreams>];
      each_stream(n, [&](int o) {
        made[o] = cuda::make_pack<A>([&](int k) {
          return post_column<float>(
              with.post(o), [&](int64_t i) { return with.comb(i, o); }, n,
              column<A>(of_layer_output, k), [&](int64_t i) { return column<A>(x[i], k); });
        });
        cuda::store_pack_once<kVector>(row_of<A>(layer.new_residual, at.token, o) + at.column,
                                       made[o], at.count);
      });
      each_stream(n, [&](int o) { x[o] = made[o]; });
    }
  }
}

bool are_vectors(const RecomputeArgs& a) {
  bool vectors = are_vectors(a.sizes, a.residual);
  for (int64_t l = 0; l < a.layer_count; ++l) {
    const RecomputeLayer& layer = a.layers[l];
    vectors = vectors && are_lines(a.sizes, layer.pre, layer.post, layer.comb) &&
              are_vectors(a.sizes, layer.layer_input, layer.layer_output, layer.new_residual);
  }
  return vectors;
}

}  // namespace

void recompute_cuda(const RecomputeArgs& a, int device, void* stream) {
  if (a.sizes.tokens == 0) return;
  constexpr size_t kMostBytes = 48 << 10;  // shared memory that needs no asking
  Layers layers;
  std::copy_n(a.layers, a.layer_count, layers.layer);
  const auto layer_count = static_cast<int>(a.layer_count);
  const size_t of_token = sizeof(float) * a.layer_count * coefficients_of_layer<0>(a.sizes.streams);
  ColumnCut cut = cut_columns(a.sizes);
  cut.block.y = std::min(cut.block.y, static_cast<unsigned>(kMostBytes / of_token));
  cut.grid.x = cuda::blocks((a.sizes.tokens + cut.block.y - 1) / cut.block.y * cut.column_blocks);
  with_kernel(a.sizes, are_vectors(a), [&](auto activation, auto streams, auto vector) {
    cuda::launch("mhc.multilayer_recompute", device, stream,
                 &recompute<decltype(activation), streams(), vector()>, cut.grid, cut.block,
                 of_token * cut.block.y, a.sizes, a.residual, layers, layer_count,
                 cut.column_blocks);
  });
}

}  // namespace ehc::mhc
