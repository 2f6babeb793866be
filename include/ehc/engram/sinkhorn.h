// engram.sinkhorn_step, sinkhorn_step_reduce, sinkhorn_finalize: the rows and the columns of an
// update brought to equal norms in turn, without rewriting the update.
#pragma once

#include <cstdint>
#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// What the three have in common.
//
// The matrix is x[r,j] = (row_scale[r] * update[r,j]) * col_scale[j]: the update stays as it is,
// only its scales change. All is fp32, sums start from +0, eps is rounded once to fp32.
//
// A row of zeros has norm 0, adds nothing to the columns and stays zeros. With row_scale 0 it keeps
// that scale, with another it gets row_scale / eps: give such rows the scale 0. A column of zeros
// keeps its scale. NaN and inf go where the formulas take them: NaN in a row makes that row and
// then every column NaN. Squares that leave the range of fp32 are added once more in another unit,
// so that norms of very small and very large rows are right.
//
// Strides of rows are free. Determinism: a row's norm depends on that row and col_scale alone; sums
// over rows on the number of rows and the rows of their chunk. Same bits for any number of threads,
// strides and alignment, from run to run of one implementation.

// A row step: norms of the rows of x, the scales that make them 1, and, of the matrix with these
// scales, the sum of squares of each column.
//   row_norm[r] = sqrt(sum over j of x[r,j]^2)
//   new_row_scale[r] = row_scale[r] / (row_norm[r] + eps)
//   col_partial[p,j] = sum of ((new_row_scale[r] * update[r,j]) * col_scale[j])^2 over the rows of
//                      chunk p, in row order (on a device: in an order that rows and hd fix)
// P = sinkhorn_partials(rows). new_row_scale may be the very same view as row_scale; all else must
// be apart. Bytes: 4*rows*hd + 12*rows + 4*P*hd + 4*hd. Contract 1.12b.
struct SinkhornStep {
  Tensor update{};              // F32[rows, hd]
  Tensor row_scale{};           // F32[rows]
  Tensor col_scale{};           // F32[hd]
  Tensor row_norm{};            // out: F32[rows]
  Tensor new_row_scale{};       // out: F32[rows]
  Tensor col_partial{};         // out: F32[P, hd]
  std::optional<double> eps{};  // > 0, required
};

// Throws Error{contract} for arguments that break the above. The reference and devices need
// workspace.
EHC_API void sinkhorn_step(Context& context, const SinkhornStep& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const SinkhornStep& params);

// P, the number of partial sums over so many rows: at most 128, 0 for none.
EHC_API int64_t sinkhorn_partials(int64_t rows);

// The end of a step: the partials added in ascending order, and with col_scale the column step.
//   col_sumsq[j] = sum over p of col_partial[p,j]
//   new_col_scale[j] = col_scale[j] / (sqrt(col_sumsq[j]) + eps); col_scale[j] where the sum is 0
// Any P >= 0. new_col_scale may be the very same view as col_scale; all else must be apart.
// Bytes: 4*P*hd + 4*hd, with col_scale 12*hd. Contract 1.12c.
struct SinkhornStepReduce {
  Tensor col_partial{};         // F32[P, hd]
  Tensor col_scale{};           // F32[hd], optional
  Tensor col_sumsq{};           // out: F32[hd]
  Tensor new_col_scale{};       // out: F32[hd], exactly when col_scale
  std::optional<double> eps{};  // > 0, required with col_scale
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void sinkhorn_step_reduce(Context& context, const SinkhornStepReduce& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const SinkhornStepReduce& params);

// The last row step, written out: every row of x with norm alpha.
//   out[r,j] = x[r,j] * (alpha / (sqrt(sum over j of x[r,j]^2) + eps))
// out may be the very same view as update; all else must be apart. Bytes: 8*rows*hd + 4*rows.
// Contract 1.12d.
struct SinkhornFinalize {
  Tensor update{};                // F32[rows, hd]
  Tensor row_scale{};             // F32[rows]
  Tensor col_scale{};             // F32[hd]
  Tensor out{};                   // out: F32[rows, hd]
  std::optional<double> eps{};    // > 0, required
  std::optional<double> alpha{};  // > 0, required
};

// Throws Error{contract} for arguments that break the above. No workspace.
EHC_API void sinkhorn_finalize(Context& context, const SinkhornFinalize& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const SinkhornFinalize& params);

}  // namespace ehc::engram
