// Arguments of the projection, and the table of steps that are compiled per instruction set.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"
#include "ehc/dtype.h"

namespace ehc::engram {

// Products that are added one after the other. The sums of such chains are added in ascending
// order, which keeps the error of E = 6144 near that of one chain.
inline constexpr int64_t kProjectionChain = 128;

struct ProjectionArgs {
  const void* embedding;  // row t at t*embedding_stride
  const void* weight;     // row (j, i) at j*weight_stride + i*weight_row_stride
  const void* bias;       // (j, i) at j*bias_stride + i, or null
  void* kv;               // (t, j, i) at t*kv_token_stride + j*kv_stride + i
  int64_t embedding_stride;
  int64_t weight_stride;
  int64_t weight_row_stride;
  int64_t bias_stride;
  int64_t kv_token_stride;
  int64_t kv_stride;
  int64_t tokens;
  int64_t depth;     // E
  int64_t branches;  // n+1
  int64_t width;     // d
  DType type;
};

// Rows of `depth` elements: tokens of the embedding, or output columns (j*d + i) of the weight.
struct ProjectionRows {
  const void* data;
  int64_t inner_count;  // row r at r/inner_count*outer_stride + r%inner_count*inner_stride
  int64_t inner_stride;
  int64_t outer_stride;
  int64_t depth;
  DType type;
};

// Steps of the blocked product. Rows past the last one count as zeros.
struct ProjectionSteps {
  int64_t row_panel;     // tokens that the built-in product takes at a time
  int64_t column_panel;  // columns likewise
  // Rows [first, first + count) as fp32 [count, depth].
  void (*widen)(const ProjectionRows& rows, int64_t first, int64_t count, float* out);
  // The same as panels: fp32 [ceil(count/panel), depth, panel].
  void (*pack_row_panels)(const ProjectionRows& rows, int64_t first, int64_t count, float* out);
  void (*pack_column_panels)(const ProjectionRows& rows, int64_t first, int64_t count, float* out);
  // sums[rows, columns] (row stride `columns`) of whole panels; without `accumulate` not read.
  void (*multiply)(const float* row_panels, const float* column_panels, int64_t rows,
                   int64_t columns, int64_t depth, bool accumulate, float* sums);
  // kv[t..t+tokens, columns c..c+columns) = round(sums + bias); sums row stride given.
  void (*finish)(const ProjectionArgs& args, const float* sums, int64_t sums_stride, int64_t t,
                 int64_t tokens, int64_t c, int64_t columns);
};

// The steps for operands of `type`: bf16, f16 or f32.
EHC_CPU_KERNEL(ProjectionSteps projection_steps(DType type));

}  // namespace ehc::engram
