// engram.optimizer_step on CUDA (sm_80+): the first and the last pass over the table. Those between
// are the kernels of sinkhorn_step and sinkhorn_step_reduce.
//
//   first: A, m' of momentum_update, v[r] = norm of A_r; row r lives when v[r] > tau * mean v
//   last:  W' = round(fma(-rate, x * (alpha / (norm of x_r + eps)), W)), x = scaled A
//   W, g, m W[rows,hd], A F32[rows,hd]
//
// Bytes an element: g + 2m + 4, 4 a round, 4 + 2W. Rows that do not live are not read again, their
// weights are copied.
// Algorithm: a team of threads per row (row_team.cuh); in the first pass it takes kTeamRows rows
// one after the other, so that the gradient of a row is looked for once. Norms are added in double
// by chunks of rows. No number comes to the host: whether all norms are finite stays on the device.
// Same bits as the operators one after the other. Class R.
#include "ops/engram/momentum_update/momentum_update_math.h"
#include "ops/engram/optimizer_step/optimizer_step_math.h"
#include "ops/engram/shared/row_team.cuh"

namespace ehc::engram {

namespace {

using Form = OptimizerStepArgs::Form;

constexpr int kTeamRows = 8;

template <class W>
__device__ __forceinline__ W* row_of(const WeightRows& rows, int64_t r) {
  return static_cast<W*>(rows.data) + r * rows.stride;
}

template <bool kVector, class Grad, class Momentum>
__global__ void __launch_bounds__(kTeamThreads)
    momentum_kernel(const __grid_constant__ OptimizerStepArgs a, int threads, float* norms) {
  __shared__ TeamRoom room;
  Team team(threads, room);
  const int64_t width = a.matrix.x.width;
  const int teams = kTeamThreads / threads;
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) * teams + team.index()) * kTeamRows;
  const int64_t end = min(begin + kTeamRows, a.rows);
  const auto each_four = [&](const auto& body) {
#pragma unroll 2
    for (int64_t column = team.thread() * kFour; column < width; column += threads * kFour) {
      body(column, width - column);
    }
  };
  GradientCursor gradient(a, begin);
  for (int64_t r = begin; r < end; ++r) {
    const int64_t t = table_row(a, r);
    const int64_t u = gradient.at(r);
    const Momentum* momentum = row_of<const Momentum>(a.momentum, t);
    Momentum* new_momentum = row_of<Momentum>(a.new_momentum, t);
    float* update = a.update + r * a.matrix.x.update_stride;
    float squares = 0;
    each_four([&](int64_t column, int64_t count) {
      Four g;
      if (u >= 0) g = load_four<kVector>(row_of<const Grad>(a.grad, u) + column, count);
      const Four m = load_four<kVector>(momentum + column, count);
      Four new_m, new_a;
#pragma unroll
      for (int k = 0; k < kFour; ++k) {
        const Moved moved = move_element(a.factors, g.value[k], m.value[k]);
        new_m.value[k] = moved.momentum;
        new_a.value[k] = moved.update;
        if (kVector || k < count) squares = fmaf(moved.update, moved.update, squares);
      }
      store_four<kVector>(new_momentum + column, new_m, count);
      store_four<kVector>(update + column, new_a, count);
    });
    const float norm = norm_of(team.sum(squares), [&](float unit) {
      float sum = 0;
      each_four([&](int64_t column, int64_t count) {
        const Four x = load_four<kVector>(update + column, count);  // the thread's own
#pragma unroll
        for (int k = 0; k < kFour; ++k) {
          const float y = x.value[k] * unit;
          if (kVector || k < count) sum = fmaf(y, y, sum);
        }
      });
      return team.sum(sum);
    });
    if (team.thread() == 0) norms[r] = norm;
  }
}

// --- norms to row scales ---

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int distance = cuda::kWarp / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(cuda::kAllLanes, x, distance);
  }
  return x;
}

// The sum of the norms of a chunk of rows.
__global__ void __launch_bounds__(kTeamThreads)
    chunk_norms(const float* norms, int64_t rows, int64_t chunk_rows, double* sums) {
  __shared__ double of_warp[kTeamWarps];
  const int64_t end = min(rows, (blockIdx.x + 1) * chunk_rows);
  double sum = 0;
  for (int64_t r = blockIdx.x * chunk_rows + threadIdx.x; r < end; r += kTeamThreads) {
    sum += static_cast<double>(norms[r]);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % cuda::kWarp == 0) of_warp[threadIdx.x / cuda::kWarp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kTeamWarps; ++w) sum += of_warp[w];
  sums[blockIdx.x] = sum;
}

// Norms to scales 1 and 0, col_scale to 1.
__global__ void __launch_bounds__(kTeamThreads)
    live_kernel(const __grid_constant__ OptimizerStepArgs a, const double* sums, int64_t chunks,
                int* finite) {
  const int lane = threadIdx.x % cuda::kWarp;
  double total = 0;
  for (int64_t c = lane; c < chunks; c += cuda::kWarp) total += sums[c];
  total = warp_sum(total);
  const double threshold = live_threshold(a, total);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kTeamThreads + threadIdx.x;
  if (i == 0) *finite = isfinite(total) ? 1 : 0;
  if (i < a.rows) a.row_scale[i] = lives(a.row_scale[i], threshold) ? 1.0f : 0.0f;
  if (i < a.matrix.x.width) a.col_scale[i] = 1.0f;
}

// --- weights ---

template <class Shape, bool kVector, class W>
__global__ void __launch_bounds__(kTeamThreads, kRowBlocks<Shape>)
    weight_kernel(const __grid_constant__ OptimizerStepArgs a, const int* finite) {
  __shared__ TeamRoom room;
  Team team(Shape::kThreads, room);
  const ScaledUpdate& x = a.matrix.x;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * Shape::kTeams + team.index();
  if (r >= a.rows) return;
  const int64_t t = table_row(a, r);
  const W* weight = row_of<const W>(a.weight, t);
  W* new_weight = row_of<W>(a.new_weight, t);
  const float scale = x.row_scale[r];
  if (scale == 0.0f && *finite != 0) {
    if (a.weight.data == a.new_weight.data) return;
    for (int64_t j = team.thread(); j < x.width; j += Shape::kThreads) new_weight[j] = weight[j];
    return;
  }
  TeamRow<Shape, kVector> row;
  row.load(x.update + r * x.update_stride, x.width);
  const float norm = norm_of_row(row, scale, x.col_scale, x.width, team);
  const float factor = row_factor(a.matrix.alpha, norm, x.eps);
  row.each(x.width, [&](int, int64_t column, int64_t count, const Four& four) {
    const Four col = load_four<kVector>(x.col_scale + column, count);
    Four w = load_four<kVector>(weight + column, count);
#pragma unroll
    for (int k = 0; k < kFour; ++k) {
      const float change = four.value[k] * scale * col.value[k] * factor;
      w.value[k] = fmaf(-a.rate, change, w.value[k]);
    }
    store_four<kVector>(new_weight + column, w, count);
  });
}

// --- the rows that a lazy step leaves alone ---

template <class Bits>
__global__ void __launch_bounds__(kTeamThreads)
    copy_kernel(const Bits* from, int64_t from_stride, Bits* to, int64_t to_stride, int64_t rows,
                int64_t width, int64_t column_blocks) {
  const RowPlace at(column_blocks, 1, 1);
  if (at.row >= rows || at.column >= width) return;
  to[at.row * to_stride + at.column] = from[at.row * from_stride + at.column];
}

template <class W>
bool are_vectors(const WeightRows& rows, int64_t width) {
  return is_vector_row(rows.data, rows.stride, width, sizeof(W));
}

constexpr const char* kName = "engram.optimizer_step";

}  // namespace

void optimizer_copy_cuda(const WeightRows& from, const WeightRows& to, int64_t rows, int64_t width,
                         int device, void* stream) {
  if (from.data == to.data || rows == 0) return;
  const RowCut cut = cut_rows(rows, width, 1, 1);
  if (from.type == DType::f32) {
    launch_rows(kName, device, stream, cut, &copy_kernel<uint32_t>,
                static_cast<const uint32_t*>(from.data), from.stride,
                static_cast<uint32_t*>(to.data), to.stride, rows, width);
  } else {
    launch_rows(kName, device, stream, cut, &copy_kernel<uint16_t>,
                static_cast<const uint16_t*>(from.data), from.stride,
                static_cast<uint16_t*>(to.data), to.stride, rows, width);
  }
}

void optimizer_momentum_cuda(const OptimizerStepArgs& a, double* sums, int* finite, int device,
                             void* stream) {
  const int64_t width = a.matrix.x.width;
  with_weight(a.grad.type, [&](auto grad) {
    with_weight(a.momentum.type, [&](auto momentum) {
      using Grad = decltype(grad);
      using Momentum = decltype(momentum);
      const bool vector = are_vectors<Grad>(a.grad, width) &&
                          are_vectors<Momentum>(a.momentum, width) &&
                          are_vectors<Momentum>(a.new_momentum, width);
      const int threads = team_threads(width);
      const int64_t of_block = int64_t{kTeamThreads} / threads * kTeamRows;
      with_flag(vector, [&](auto is_vector) {
        cuda::launch(kName, device, stream, &momentum_kernel<is_vector(), Grad, Momentum>,
                     dim3(cuda::blocks((a.rows + of_block - 1) / of_block)), dim3(kTeamThreads), 0,
                     a, threads, a.row_scale);
      });
    });
  });
  const int64_t chunks = sinkhorn_chunks(a.rows);
  cuda::launch(kName, device, stream, &chunk_norms, dim3(cuda::blocks(chunks)), dim3(kTeamThreads),
               0, a.row_scale, a.rows, sinkhorn_chunk_rows(a.rows), sums);
  const int64_t most = std::max(a.rows, width);
  cuda::launch(kName, device, stream, &live_kernel,
               dim3(cuda::blocks((most + kTeamThreads - 1) / kTeamThreads)), dim3(kTeamThreads), 0,
               a, sums, chunks, finite);
}

void optimizer_weights_cuda(const OptimizerStepArgs& a, const int* finite, int device,
                            void* stream) {
  const int64_t width = a.matrix.x.width;
  with_weight(a.weight.type, [&](auto weight) {
    using W = decltype(weight);
    const bool vector = are_vectors<W>(a.weight, width) && are_vectors<W>(a.new_weight, width);
    with_team(width, vector, [&](auto shape, auto is_vector) {
      using Shape = decltype(shape);
      constexpr int64_t kOfBlock = Shape::kTeams;
      cuda::launch(kName, device, stream, &weight_kernel<Shape, is_vector(), W>,
                   dim3(cuda::blocks((a.rows + kOfBlock - 1) / kOfBlock)), dim3(kTeamThreads), 0, a,
                   finite);
    });
  });
}

}  // namespace ehc::engram
