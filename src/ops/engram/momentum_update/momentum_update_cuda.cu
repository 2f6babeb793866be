// engram.momentum_update on CUDA (sm_80+).
//
//   m' = fma(m, beta, round((1 - beta) g)), A = fma(g, 1 - beta, round(beta m')) or m'
//   grad, momentum, new momentum W[rows,hd], A F32[rows,hd]
//
// Bytes: grad + 2 * momentum + 4 an element. A thread per four columns of a row; a matrix without
// gaps is one row. Class E: the formula fixes every
// rounding.
#include "ops/engram/momentum_update/momentum_update_math.h"
#include "ops/engram/shared/table_rows.cuh"

namespace ehc::engram {

namespace {

template <bool kVector, class Grad, class Momentum>
__global__ void momentum_kernel(const __grid_constant__ MomentumUpdateArgs a, int64_t rows,
                                int64_t column_blocks) {
  const RowPlace at(column_blocks, kFour, 1);
  const int64_t count = a.width - at.column;
  if (count <= 0 || at.row >= rows) return;
  const Four grad = load_four<kVector>(
      static_cast<const Grad*>(a.grad) + at.row * a.grad_stride + at.column, count);
  const Four momentum = load_four<kVector>(
      static_cast<const Momentum*>(a.momentum) + at.row * a.momentum_stride + at.column, count);
  Four new_a, new_m;
#pragma unroll
  for (int k = 0; k < kFour; ++k) {
    const Moved moved = move_element(a.factors, grad.value[k], momentum.value[k]);
    new_a.value[k] = moved.update;
    new_m.value[k] = moved.momentum;
  }
  store_four<kVector>(a.update + at.row * a.update_stride + at.column, new_a, count);
  store_four<kVector>(
      static_cast<Momentum*>(a.new_momentum) + at.row * a.new_momentum_stride + at.column, new_m,
      count);
}

}  // namespace

void momentum_update_cuda(const MomentumUpdateArgs& args, int64_t rows, int device, void* stream) {
  if (rows == 0) return;
  MomentumUpdateArgs a = args;
  if (a.grad_stride == a.width && a.momentum_stride == a.width &&
      a.new_momentum_stride == a.width && a.update_stride == a.width) {
    a.width *= rows;
    rows = 1;
    a.grad_stride = a.momentum_stride = a.new_momentum_stride = a.update_stride = 0;
  }
  const auto aligned = [&](const void* data, int64_t stride, DType type) {
    return are_aligned(data, stride, size_of(type), kFour * size_of(type));
  };
  const bool vector = a.width % kFour == 0 && aligned(a.grad, a.grad_stride, a.grad_type) &&
                      aligned(a.momentum, a.momentum_stride, a.momentum_type) &&
                      aligned(a.new_momentum, a.new_momentum_stride, a.momentum_type) &&
                      aligned(a.update, a.update_stride, DType::f32);
  with_weight(a.grad_type, [&](auto grad) {
    with_weight(a.momentum_type, [&](auto momentum) {
      with_flag(vector, [&](auto is_vector) {
        launch_rows("engram.momentum_update", device, stream, cut_rows(rows, a.width, kFour, 1),
                    &momentum_kernel<is_vector(), decltype(grad), decltype(momentum)>, a, rows);
      });
    });
  });
}

}  // namespace ehc::engram
