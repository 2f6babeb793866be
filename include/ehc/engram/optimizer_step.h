// engram.optimizer_step: one step of a table's optimizer, from gradient to weights.
#pragma once

#include <cstdint>
#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::engram {

// Constants of a step, the same for its three forms. Each is rounded once to fp32, lr * gamma and
// 1 - beta after being formed in double.
//
// The step, with the operators momentum_update and sinkhorn_*:
//   1. A, new_momentum = momentum_update(grad, momentum, beta, nesterov), for all rows
//   2. row r lives when norm(A_r) > tau * (mean norm of all rows), a strict comparison in double;
//      row_scale = 1 for such rows and 0 for the others, col_scale = 1
//   3. `repeat` times: sinkhorn_step, then sinkhorn_step_reduce with col_scale
//   4. D = sinkhorn_finalize(alpha): every row that lives has norm alpha
//   5. new_weight = round(fma(-(lr * gamma), D, weight))
// Rows that do not live keep their weights bit for bit, while their momentum moves. Only if a norm
// of step 2 is NaN or inf does no row live, and then the formulas decide: NaN anywhere in A makes
// every weight NaN. Columns of zeros keep their weights.
//
// The bits are those of the operators called one after the other. A, F32, takes rows * hd floats of
// the workspace, is written once and read at most 1 + repeat times: in fp32, 16 + 4 * repeat + 12
// bytes an element in all.
//
// Row strides are free; no bit depends on them. new_weight may be the very same view as weight and
// new_momentum as momentum (in place); all else must be apart. Determinism: same bits for any
// number of threads, and from run to run of one implementation. Contract 1.12.

// weight, grad and momentum are BF16 or F32, each of its own type.
struct OptimizerStep {
  Tensor weight{};                // BF16 or F32[rows, hd]
  Tensor grad{};                  // BF16 or F32[rows, hd]
  Tensor momentum{};              // BF16 or F32[rows, hd]
  Tensor new_weight{};            // out: as weight
  Tensor new_momentum{};          // out: as momentum
  std::optional<double> lr{};     // >= 0, required
  std::optional<double> eps{};    // > 0, required
  double beta = 0.95;             // 0..1
  bool nesterov = true;           // look one step ahead
  int64_t repeat = 5;             // 1..64
  double tau = 1e-3;              // >= 0
  double gamma = 0.18;            // > 0
  std::optional<double> alpha{};  // > 0; sqrt(hd) when left out, for rows of unit RMS
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void optimizer_step(Context& context, const OptimizerStep& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const OptimizerStep& params);

// The same step, bit for bit, for a gradient that is zero outside of the rows unique_rows: row
// unique_rows[u] has the gradient grad_rows[u]. All rows take part, because their momentum moves
// them. unique_rows ascends strictly within 0 .. rows-1; U may be 0. It is checked where the host
// can read it.
struct OptimizerStepSparse {
  Tensor weight{};                // BF16 or F32[rows, hd]
  Tensor unique_rows{};           // I32 or I64[U]
  Tensor grad_rows{};             // BF16 or F32[U, hd]
  Tensor momentum{};              // BF16 or F32[rows, hd]
  Tensor new_weight{};            // out: as weight
  Tensor new_momentum{};          // out: as momentum
  std::optional<double> lr{};     // >= 0, required
  std::optional<double> eps{};    // > 0, required
  double beta = 0.95;             // 0..1
  bool nesterov = true;           // look one step ahead
  int64_t repeat = 5;             // 1..64
  double tau = 1e-3;              // >= 0
  double gamma = 0.18;            // > 0
  std::optional<double> alpha{};  // > 0; sqrt(hd) when left out
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void optimizer_step_sparse(Context& context, const OptimizerStepSparse& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const OptimizerStepSparse& params);

// Another rule, not another way to compute the same: optimizer_step of the rows unique_rows as if
// they were the whole table, also for the mean norm and the columns. All other rows of weight and
// momentum keep their bits, and what they hold does not matter. In place it touches the rows
// unique_rows alone, and needs workspace for these.
struct OptimizerStepLazy {
  Tensor weight{};                // BF16 or F32[rows, hd]
  Tensor unique_rows{};           // I32 or I64[U], strictly ascending within 0 .. rows-1
  Tensor grad_rows{};             // BF16 or F32[U, hd]
  Tensor momentum{};              // BF16 or F32[rows, hd]
  Tensor new_weight{};            // out: as weight
  Tensor new_momentum{};          // out: as momentum
  std::optional<double> lr{};     // >= 0, required
  std::optional<double> eps{};    // > 0, required
  double beta = 0.95;             // 0..1
  bool nesterov = true;           // look one step ahead
  int64_t repeat = 5;             // 1..64
  double tau = 1e-3;              // >= 0
  double gamma = 0.18;            // > 0
  std::optional<double> alpha{};  // > 0; sqrt(hd) when left out
};

// Throws Error{contract} for arguments that break the above. Needs workspace.
EHC_API void optimizer_step_lazy(Context& context, const OptimizerStepLazy& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const OptimizerStepLazy& params);

}  // namespace ehc::engram
