// Arguments of the projection's gradients, and the steps that are compiled per instruction set.
#pragma once

#include "ops/engram/kv_projection/kv_projection_args.h"

namespace ehc::engram {

struct ProjectionBackwardArgs {
  const void* grad_kv;           // (t, j, i) at t*grad_kv_token_stride + j*grad_kv_stride + i
  const void* embedding;         // row t at t*embedding_stride
  const void* weight;            // row (j, i) at j*weight_stride + i*weight_row_stride
  const float* grad_weight_acc;  // as grad_weight with strides of its own, or null
  const float* grad_bias_acc;    // or null
  void* grad_embedding;          // row t at t*grad_embedding_stride
  float* grad_weight;            // row (j, i) at j*grad_weight_stride + i*grad_weight_row_stride
  float* grad_bias;              // (j, i) at j*grad_bias_stride + i
  int64_t grad_kv_token_stride;
  int64_t grad_kv_stride;
  int64_t embedding_stride;
  int64_t weight_stride;
  int64_t weight_row_stride;
  int64_t grad_weight_acc_stride;
  int64_t grad_weight_acc_row_stride;
  int64_t grad_bias_acc_stride;
  int64_t grad_embedding_stride;
  int64_t grad_weight_stride;
  int64_t grad_weight_row_stride;
  int64_t grad_bias_stride;
  int64_t tokens;
  int64_t depth;     // E
  int64_t branches;  // n+1
  int64_t width;     // d
  DType type;
};

// A block of a matrix product's result.
struct ProjectionBlock {
  int64_t row, rows;
  int64_t column, columns;
};

// Steps of the blocked products. An operand whose rows are the summation index k stays as it lies.
struct ProjectionBackwardSteps {
  // Columns [column, column + columns) of rows [first, first + count) as fp32
  // [ceil(columns/panel), count, panel]. A panel of at most a pair of vectors is filled up with
  // zeros, others divide `columns`.
  void (*pack_by_depth)(const ProjectionRows& rows, int64_t first, int64_t count, int64_t column,
                        int64_t columns, int64_t panel, float* out);
  // to[row.., column..] = round(sums); sums row stride given.
  void (*finish_embedding)(const ProjectionBackwardArgs& args, const ProjectionBlock& block,
                           const float* sums, int64_t stride);
  // grad_weight[j, row.., column..] = (target +) sums.
  void (*finish_weight)(const ProjectionBackwardArgs& args, int64_t branch,
                        const ProjectionBlock& block, const float* sums, int64_t stride);
  // grad_bias[j, begin..end) = (target +) sum over t of grad_kv.
  void (*sum_bias)(const ProjectionBackwardArgs& args, int64_t branch, int64_t begin, int64_t end);
};

// The steps for operands of `type`: bf16, f16 or f32.
EHC_CPU_KERNEL(ProjectionBackwardSteps projection_backward_steps(DType type));

}  // namespace ehc::engram
