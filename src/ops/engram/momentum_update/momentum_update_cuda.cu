// engram.momentum_update on CUDA (sm_80+).
//
//   m' = fma(m, beta, round((1 - beta) g)), A = fma(g, 1 - beta, round(beta m')) or m'
//   grad, momentum, new momentum W[rows,hd], A F32[rows,hd]
//
// Bytes: grad + 2 * momentum + 4 an element. A thread has twice four columns of a row, all of which
// it reads before it writes; a matrix without gaps is one row. Class E: the formula fixes every
// rounding.
#include "ops/engram/momentum_update/momentum_update_math.h"
#include "ops/engram/shared/table_rows.cuh"

namespace ehc::engram {

namespace {

constexpr int kPacks = 2;  // of four columns, a block's width apart

template <bool kVector, class Grad, class Momentum>
__global__ void momentum_kernel(const __grid_constant__ MomentumUpdateArgs a, int64_t rows,
                                int64_t column_blocks) {
  const RowPlace at(column_blocks, kFour, 1, kPacks);
  if (at.row >= rows) return;
  const auto* grad = static_cast<const Grad*>(a.grad) + at.row * a.grad_stride;
  const auto* momentum = static_cast<const Momentum*>(a.momentum) + at.row * a.momentum_stride;
  float* update = a.update + at.row * a.update_stride;
  auto* new_momentum = static_cast<Momentum*>(a.new_momentum) + at.row * a.new_momentum_stride;
  Four g[kPacks], m[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t column = at.column + p * blockDim.x * kFour;
    if (column >= a.width) break;
    g[p] = load_four<kVector>(grad + column, a.width - column);
    m[p] = load_four<kVector>(momentum + column, a.width - column);
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t column = at.column + p * blockDim.x * kFour;
    if (column >= a.width) break;
    Four new_a, new_m;
#pragma unroll
    for (int k = 0; k < kFour; ++k) {
      const Moved moved = move_element(a.factors, g[p].value[k], m[p].value[k]);
      new_a.value[k] = moved.update;
      new_m.value[k] = moved.momentum;
    }
    store_four<kVector>(update + column, new_a, a.width - column);
    store_four<kVector>(new_momentum + column, new_m, a.width - column);
  }
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
        launch_rows("engram.momentum_update", device, stream,
                    cut_rows(rows, a.width, kFour, 1, kPacks),
                    &momentum_kernel<is_vector(), decltype(grad), decltype(momentum)>, a, rows);
      });
    });
  });
}

}  // namespace ehc::engram
