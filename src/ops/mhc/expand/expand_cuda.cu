// mhc.expand_fwd on CUDA (sm_80+).
//
//   x_i = h for all i    h A[T,d], x A[T,n,d]
//
// Bytes a token in 16-bit types: 2(1+n)d.
// Algorithm: a thread reads 16 bytes of h and writes them to every stream.
// Exact: bits are moved, not values. The backward pass is pre_apply with coefficients of 1.
#include "ops/mhc/expand/expand_args.h"
#include "ops/mhc/shared/stream_rows.cuh"

namespace ehc::mhc {

namespace {

template <class A, int kStreams, bool kVector>
__global__ void expand_fwd(const __grid_constant__ ExpandForwardArgs a, int64_t column_blocks) {
  cuda::wait_for_previous();
  const Place at = Place::of_thread<A>(a.sizes, column_blocks);
  if (at.count <= 0) return;
  const A* hidden = row_of<const A>(a.hidden, at.token) + at.column;
  const Pack pack = cuda::load_pack<kVector>(hidden, at.count);
  each_stream(count_of<kStreams>(a.sizes.streams), [&](int i) {
    cuda::store_pack<kVector>(row_of<A>(a.residual, at.token, i) + at.column, pack, at.count);
  });
}

}  // namespace

void expand_fwd_cuda(const ExpandForwardArgs& a, int device, void* stream) {
  with_kernel(a.sizes, are_vectors(a.sizes, a.hidden, a.residual),
              [&](auto activation, auto streams, auto vector) {
                launch_columns_overlapping("mhc.expand_fwd", device, stream, a.sizes,
                                           &expand_fwd<decltype(activation), streams(), vector()>,
                                           a);
              });
}

}  // namespace ehc::mhc
