// mhc.multilayer_recompute on CUDA (sm_80+).
//
//   layer_input_l = round(sum_i pre_l,i x_i), then x'_o = round(c_l,o y_l + sum_i a_l,io x_i) is
//   the x of the next layer; x A[T,n,d]; layer_input, y A[T,d]; pre, c F32[T,n]; a F32[T,n,n]
//
// Bytes a token in 16-bit types, Ll inputs and Lp posts: 2nd + Ll(4n+2d) + Lp(2d+4n+4n^2+2nd).
// Algorithm: columns are independent, so a thread takes 16 bytes of columns of a token through all
// layers with its streams in registers; what it reads of the next layer is on its way meanwhile.
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

// What a thread reads of a layer.
template <class A, int kStreams, bool kVector>
struct LayerInputs {
  StreamVector<kStreams> pre, post;
  StreamMatrix<kStreams> comb;
  Pack y;

  __device__ __forceinline__ void load(const RecomputeLayer& layer, const Place& at, int n) {
    pre.load(layer.pre, at.token, n);
    if (!layer.has_post) return;
    y = cuda::load_pack<kVector>(row_of<const A>(layer.layer_output, at.token) + at.column,
                                 at.count);
    post.load(layer.post, at.token, n);
    comb.load(layer.comb, at.token, n);
  }
};

template <class A, int kStreams, bool kVector>
__global__ void __launch_bounds__(kMostColumnThreads)
    recompute(const __grid_constant__ StreamSizes sizes,
              const __grid_constant__ StreamRows residual, const __grid_constant__ Layers layers,
              int layer_count, int64_t column_blocks) {
  const Place at = Place::of_thread<A>(sizes, column_blocks);
  if (at.count <= 0) return;
  const int n = count_of<kStreams>(sizes.streams);
  Pack x[kRoom<kStreams>];
  load_streams<kStreams, kVector, A>(residual, at.token, at.column, at.count, n, x);
  LayerInputs<A, kStreams, kVector> now, next;
  now.load(layers.layer[0], at, n);
  for (int l = 0; l < layer_count; ++l) {
    const RecomputeLayer& layer = layers.layer[l];
    if (l + 1 < layer_count) next.load(layers.layer[l + 1], at, n);
    const Pack input = cuda::make_pack<A>([&](int k) {
      return pre_apply_column<float>([&](int64_t i) { return now.pre[i]; }, n,
                                     [&](int64_t i) { return column<A>(x[i], k); });
    });
    cuda::store_pack<kVector>(row_of<A>(layer.layer_input, at.token) + at.column, input, at.count);
    if (!layer.has_post) return;
    Pack made[kRoom<kStreams>];
#pragma unroll
    for (int o = 0; o < n; ++o) {
      made[o] = cuda::make_pack<A>([&](int k) {
        return post_column<float>(
            now.post[o], [&](int64_t i) { return now.comb[i][o]; }, n, column<A>(now.y, k),
            [&](int64_t i) { return column<A>(x[i], k); });
      });
      cuda::store_pack<kVector>(row_of<A>(layer.new_residual, at.token, o) + at.column, made[o],
                                at.count);
    }
#pragma unroll
    for (int o = 0; o < n; ++o) x[o] = made[o];
    now = next;
  }
}

bool are_vectors(const RecomputeArgs& a) {
  bool vectors = are_vectors(a.sizes, a.residual);
  for (int64_t l = 0; l < a.layer_count; ++l) {
    const RecomputeLayer& layer = a.layers[l];
    vectors =
        vectors && are_vectors(a.sizes, layer.layer_input, layer.layer_output, layer.new_residual);
  }
  return vectors;
}

}  // namespace

void recompute_cuda(const RecomputeArgs& a, int device, void* stream) {
  Layers layers;
  std::copy_n(a.layers, a.layer_count, layers.layer);
  with_kernel(a.sizes, are_vectors(a), [&](auto activation, auto streams, auto vector) {
    launch_columns("mhc.multilayer_recompute", device, stream, a.sizes,
                   &recompute<decltype(activation), streams(), vector()>, a.sizes, a.residual,
                   layers, static_cast<int>(a.layer_count));
  });
}

}  // namespace ehc::mhc
