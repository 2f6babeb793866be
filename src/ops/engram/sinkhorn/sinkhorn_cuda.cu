// engram.sinkhorn_step, sinkhorn_step_reduce, sinkhorn_finalize on CUDA (sm_80+).
//
//   x[r,j] = (row_scale[r] * A[r,j]) * col_scale[j], v = sqrt(sum over j of x^2)
//   step: row_scale[r] /= v + eps, partial[p,j] = sum over rows of chunk p of x^2 with that scale
//   reduce: sumsq[j] = sum over p of partial[p,j], col_scale[j] /= sqrt(sumsq[j]) + eps
//   finalize: out[r,j] = x * (alpha / (v + eps))
//   A, out F32[rows,hd], partial F32[P,hd]
//
// Bytes: A once, and out.
// Algorithm: a team of threads holds a row in registers between its norm and its use
// (row_team.cuh). The step has four blocks for each chunk; their teams take rows in turn and keep
// the sums of their columns in registers, then teams, then the parts of a chunk are added in
// ascending order. Rows of more than 8192 columns are read twice, the second time column by column.
// Class R: the order of sums depends on the width and the number of rows alone.
#include "ops/engram/shared/row_team.cuh"

namespace ehc::engram {

namespace {

// The rows of a part.
struct PartRows {
  int64_t begin, end;

  __device__ PartRows(int64_t part, int64_t rows, int64_t chunk_rows) {
    const int64_t size = (chunk_rows + kSinkhornParts - 1) / kSinkhornParts;
    const int64_t chunk = part / kSinkhornParts;
    begin = chunk * chunk_rows + part % kSinkhornParts * size;
    end = min(min(rows, (chunk + 1) * chunk_rows), begin + size);
  }
};

// acc += ((A * scale) * col_scale)^2 for four columns.
template <bool kVector>
__device__ __forceinline__ void add_squares(const Four& a, float scale, const Four& col,
                                            int64_t count, float* acc) {
#pragma unroll
  for (int k = 0; k < kFour; ++k) {
    const float x = a.value[k] * scale * col.value[k];
    if (kVector || k < count) acc[k] = fmaf(x, x, acc[k]);
  }
}

// Blocks that a processor has at once, where registers allow it.
template <class Shape>
constexpr int kStepBlocks = Shape::kPacks <= 4 ? 4 : 2;

template <class Shape, bool kVector>
__global__ void __launch_bounds__(kTeamThreads, kStepBlocks<Shape>)
    step_kernel(const __grid_constant__ SinkhornStepArgs a, int64_t rows, int64_t chunk_rows,
                const int* finite, float* parts) {
  __shared__ TeamRoom room;
  Team team(Shape::kThreads, room);
  const bool skips = finite != nullptr && *finite != 0;
  const PartRows part(blockIdx.x, rows, chunk_rows);
  const auto scale_of = [&](int64_t r) { return r < part.end ? a.x.row_scale[r] : 0.0f; };
  float acc[Shape::kHeld * kFour] = {};
  int64_t r = part.begin + team.index();
  float next_scale = scale_of(r);  // a step ahead: it decides whether the row is read
  for (; r < part.end; r += Shape::kTeams) {
    const float scale = next_scale;
    const bool is_read = !(skips && scale == 0.0f);
    TeamRow<Shape, kVector> row;
    if (is_read) row.load(a.x.update + r * a.x.update_stride, a.x.width);
    next_scale = scale_of(r + Shape::kTeams);
    float norm = 0;
    float new_scale = 0;
    if (is_read) {
      norm = norm_of_row(row, scale, a.x.col_scale, a.x.width, team);
      new_scale = next_row_scale(scale, norm, a.x.eps);
    }
    if (team.thread() == 0) {
      if (a.row_norm != nullptr) a.row_norm[r] = norm;
      a.new_row_scale[r] = new_scale;
    }
    if constexpr (Shape::kPacks > 0) {
      if (norm == 0.0f) continue;
      row.each(a.x.width, [&](int p, int64_t column, int64_t count, const Four& four) {
        const Four col = load_four<kVector>(a.x.col_scale + column, count);
        add_squares<kVector>(four, new_scale, col, count, acc + p * kFour);
      });
    }
  }
  if constexpr (Shape::kPacks > 0) {
    float* out = parts + blockIdx.x * a.x.width;
    if constexpr (Shape::kTeams == 1) {
#pragma unroll
      for (int e = 0; e < Shape::kHeld * kFour; ++e) {
        const int column = TeamRow<Shape, kVector>::column_of(e / kFour) + e % kFour;
        if (column < a.x.width) out[column] = acc[e];
      }
    } else {
      __shared__ float of_team[Shape::kTeams][Shape::kPacks * Shape::kThreads * kFour];
#pragma unroll
      for (int e = 0; e < Shape::kPacks * kFour; ++e) {
        const int column = TeamRow<Shape, kVector>::column_of(e / kFour) + e % kFour;
        of_team[team.index()][column] = acc[e];
      }
      __syncthreads();
      for (int column = threadIdx.x; column < a.x.width; column += kTeamThreads) {
        float sum = 0;
#pragma unroll 8
        for (int w = 0; w < Shape::kTeams; ++w) sum += of_team[w][column];
        out[column] = sum;
      }
    }
  }
}

// The parts of rows that no team holds: a thread per four columns.
template <bool kVector>
__global__ void __launch_bounds__(kTeamThreads)
    columns_kernel(const __grid_constant__ SinkhornStepArgs a, int64_t rows, int64_t chunk_rows,
                   float* parts, int64_t column_blocks) {
  const int64_t index = blockIdx.x / column_blocks;
  const int64_t column =
      (blockIdx.x % column_blocks * kTeamThreads + threadIdx.x) * static_cast<int64_t>(kFour);
  const int64_t count = a.x.width - column;
  if (count <= 0) return;
  const PartRows part(index, rows, chunk_rows);
  const Four col = load_four<kVector>(a.x.col_scale + column, count);
  float acc[kFour] = {};
#pragma unroll 4
  for (int64_t r = part.begin; r < part.end; ++r) {
    const Four four = load_four<kVector>(a.x.update + r * a.x.update_stride + column, count);
    if (a.row_norm[r] != 0.0f) add_squares<kVector>(four, a.new_row_scale[r], col, count, acc);
  }
  for (int k = 0; k < kFour && k < count; ++k) parts[index * a.x.width + column + k] = acc[k];
}

struct AddParts {
  const float* parts;
  int64_t width;
  float* partial;
  int64_t partial_stride;

  __device__ void operator()(int64_t i) const {
    const int64_t p = i / width;
    const int64_t j = i % width;
    float sum = 0;
    for (int64_t q = 0; q < kSinkhornParts; ++q) {
      sum += __ldg(parts + (p * kSinkhornParts + q) * width + j);
    }
    partial[p * partial_stride + j] = sum;
  }
};

// 32 columns a block. Partials come to shared memory together; a thread per column adds them.
constexpr int kPartials = 128;

__global__ void reduce_kernel(const __grid_constant__ SinkhornReduceArgs a, int64_t width,
                              int64_t parts) {
  __shared__ float room[kPartials][cuda::kWarp];
  const int64_t j = static_cast<int64_t>(blockIdx.x) * cuda::kWarp + threadIdx.x;
  float total = 0;
  for (int64_t first = 0; first < a.partials; first += kPartials) {
    const int count = static_cast<int>(min(a.partials - first, static_cast<int64_t>(kPartials)));
#pragma unroll
    for (int i = 0; i < kPartials / cuda::kWarp; ++i) {
      const int p = i * cuda::kWarp + threadIdx.y;
      if (p >= count || j >= width) continue;
      float sum = 0;
#pragma unroll 4
      for (int64_t q = 0; q < parts; ++q) {
        sum += __ldg(a.col_partial + ((first + p) * parts + q) * a.col_partial_stride + j);
      }
      room[p][threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.y == 0) {
#pragma unroll 8
      for (int p = 0; p < count; ++p) total += room[p][threadIdx.x];
    }
    __syncthreads();
  }
  if (threadIdx.y != 0 || j >= width) return;
  if (a.col_sumsq != nullptr) a.col_sumsq[j] = total;
  if (a.col_scale != nullptr) a.new_col_scale[j] = next_col_scale(a.col_scale[j], total, a.eps);
}

template <class Shape, bool kVector>
__global__ void __launch_bounds__(kTeamThreads, kRowBlocks<Shape>)
    finalize_kernel(const __grid_constant__ SinkhornFinalizeArgs a, int64_t rows) {
  __shared__ TeamRoom room;
  Team team(Shape::kThreads, room);
  const int64_t r = static_cast<int64_t>(blockIdx.x) * Shape::kTeams + team.index();
  if (r >= rows) return;
  TeamRow<Shape, kVector> row;
  row.load(a.x.update + r * a.x.update_stride, a.x.width);
  const float scale = a.x.row_scale[r];
  const float norm = norm_of_row(row, scale, a.x.col_scale, a.x.width, team);
  const float factor = row_factor(a.alpha, norm, a.x.eps);
  row.each(a.x.width, [&](int, int64_t column, int64_t count, const Four& four) {
    const Four col = load_four<kVector>(a.x.col_scale + column, count);
    Four out;
#pragma unroll
    for (int k = 0; k < kFour; ++k) {
      out.value[k] = four.value[k] * scale * col.value[k] * factor;
    }
    store_four<kVector>(a.out + r * a.out_stride + column, out, count);
  });
}

bool is_vector_update(const ScaledUpdate& x) {
  return is_vector_row(x.update, x.update_stride, x.width, sizeof(float)) &&
         is_vector_row(x.col_scale, 0, x.width, sizeof(float));
}

}  // namespace

void sinkhorn_parts_cuda(const char* name, const SinkhornStepArgs& a, int64_t rows,
                         const int* finite, float* parts, int device, void* stream) {
  if (rows == 0) return;
  const int64_t chunk_rows = sinkhorn_chunk_rows(rows);
  const int64_t count = sinkhorn_chunks(rows) * kSinkhornParts;
  const bool vector = is_vector_update(a.x);
  with_team(a.x.width, vector, [&](auto shape, auto is_vector) {
    cuda::launch(name, device, stream, &step_kernel<decltype(shape), is_vector()>,
                 dim3(cuda::blocks(count)), dim3(kTeamThreads), 0, a, rows, chunk_rows, finite,
                 parts);
  });
  if (a.x.width <= kMostHeldWidth) return;
  constexpr int64_t kOfBlock = kTeamThreads * kFour;
  const int64_t column_blocks = (a.x.width + kOfBlock - 1) / kOfBlock;
  cuda::launch(name, device, stream, vector ? &columns_kernel<true> : &columns_kernel<false>,
               dim3(cuda::blocks(count * column_blocks)), dim3(kTeamThreads), 0, a, rows,
               chunk_rows, parts, column_blocks);
}

void sinkhorn_step_cuda(const SinkhornStepArgs& a, int64_t rows, float* parts, int device,
                        void* stream) {
  const char* name = "engram.sinkhorn_step";
  sinkhorn_parts_cuda(name, a, rows, nullptr, parts, device, stream);
  cuda::launch_each(name, device, stream, sinkhorn_chunks(rows) * a.x.width,
                    AddParts{parts, a.x.width, a.col_partial, a.col_partial_stride});
}

void sinkhorn_reduce_cuda(const char* name, const SinkhornReduceArgs& a, int64_t width,
                          int64_t parts, int device, void* stream) {
  cuda::launch(name, device, stream, &reduce_kernel,
               dim3(cuda::blocks((width + cuda::kWarp - 1) / cuda::kWarp)),
               dim3(cuda::kWarp, cuda::kWarp), 0, a, width, parts);
}

void sinkhorn_finalize_cuda(const SinkhornFinalizeArgs& a, int64_t rows, int device, void* stream) {
  if (rows == 0) return;
  const bool vector =
      is_vector_update(a.x) && is_vector_row(a.out, a.out_stride, a.x.width, sizeof(float));
  with_team(a.x.width, vector, [&](auto shape, auto is_vector) {
    using Shape = decltype(shape);
    constexpr int64_t kOfBlock = Shape::kTeams;
    cuda::launch("engram.sinkhorn_finalize", device, stream, &finalize_kernel<Shape, is_vector()>,
                 dim3(cuda::blocks((rows + kOfBlock - 1) / kOfBlock)), dim3(kTeamThreads), 0, a,
                 rows);
  });
}

}  // namespace ehc::engram
