// engram.momentum_update on CUDA (sm_80+).
//
//   m' = fma(m, beta, round((1 - beta) g)), A = fma(g, 1 - beta, round(beta m')) or m'
//   grad, momentum, new momentum W[rows,hd], A F32[rows,hd]
//
// Bytes: grad + 2 * momentum + 4 an element. A thread per eight columns of a row; a matrix without
// gaps is one row. Class E: the formula fixes every rounding.
#include "ops/engram/momentum_update/momentum_update_math.h"
#include "ops/engram/shared/table_rows.cuh"

namespace ehc::engram {

namespace {

template <bool kVector, class Grad, class Momentum>
__global__ void momentum_kernel(const __grid_constant__ MomentumUpdateArgs a, int64_t rows,
                                int64_t column_blocks) {
  const RowPlace at(column_blocks, kEight, 1);
  const int64_t count = a.width - at.column;
  if (count <= 0 || at.row >= rows) return;
  EightOf<Grad> grad;
  EightOf<Momentum> momentum;
  grad.template load<kVector>(
      static_cast<const Grad*>(a.grad) + at.row * a.grad_stride + at.column, count);
  momentum.template load<kVector>(
      static_cast<const Momentum*>(a.momentum) + at.row * a.momentum_stride + at.column, count);
  Moved moved[kEight];
#pragma unroll
  for (int k = 0; k < kEight; ++k) moved[k] = move_element(a.factors, grad[k], momentum[k]);
  EightOf<float>::of([&](int k) { return moved[k].update; })
      .template store<kVector>(a.update + at.row * a.update_stride + at.column, count);
  EightOf<Momentum>::of([&](int k) { return moved[k].momentum; })
      .template store<kVector>(
          static_cast<Momentum*>(a.new_momentum) + at.row * a.new_momentum_stride + at.column,
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
  const bool vector = a.width % kEight == 0 &&
                      are_aligned(a.grad, a.grad_stride, size_of(a.grad_type)) &&
                      are_aligned(a.momentum, a.momentum_stride, size_of(a.momentum_type)) &&
                      are_aligned(a.new_momentum, a.new_momentum_stride, size_of(a.momentum_type)) &&
                      are_aligned(a.update, a.update_stride, sizeof(float));
  with_weight(a.grad_type, [&](auto grad) {
    with_weight(a.momentum_type, [&](auto momentum) {
      with_flag(vector, [&](auto is_vector) {
        launch_rows("engram.momentum_update", device, stream, cut_rows(rows, a.width, kEight, 1),
                    &momentum_kernel<is_vector(), decltype(grad), decltype(momentum)>, a, rows);
      });
    });
  });
}

}  // namespace ehc::engram
