// Arguments of the kernels of the whole optimizer step, for its three forms.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"
#include "core/host_device.h"
#include "ehc/dtype.h"
#include "ops/engram/momentum_update/momentum_update_args.h"
#include "ops/engram/sinkhorn/sinkhorn_args.h"

namespace ehc::engram {

// A matrix W[rows,hd] of bf16 or f32.
struct WeightRows {
  void* data = nullptr;
  DType type = DType::none;
  int64_t stride = 0;
};

// Ascending rows of the table that have a gradient.
struct RowList {
  const void* data = nullptr;  // I32 or I64[count]
  bool are_64 = false;
  int64_t count = 0;
};

EHC_HD int64_t row_at(const RowList& list, int64_t u) {
  return list.are_64 ? static_cast<const int64_t*>(list.data)[u]
                     : static_cast<const int32_t*>(list.data)[u];
}

struct OptimizerStepArgs {
  // dense: rows are those of the table, each with its gradient. sparse: row touched[u] has gradient
  // u, any other row none. lazy: row u of the step is row touched[u] of the table.
  enum class Form : uint8_t { dense, sparse, lazy };
  Form form = Form::dense;
  int64_t rows = 0;  // that take part in the step
  RowList touched;
  WeightRows grad;
  WeightRows weight;
  WeightRows momentum;
  WeightRows new_weight;    // may be `weight`
  WeightRows new_momentum;  // may be `momentum`
  MomentumFactors factors;
  float tau = 0;
  float rate = 0;                // lr * gamma
  const float* zeros = nullptr;  // hd zeros: the gradient of a row without one
  // The update A, its scales, eps and alpha; `out` is not used.
  SinkhornFinalizeArgs matrix;
  float* update = nullptr;     // matrix.x.update
  float* row_scale = nullptr;  // matrix.x.row_scale
  float* col_scale = nullptr;  // matrix.x.col_scale
  // Rows of scale 0 keep their weights.
  bool skip_zero_scales = false;
  // Store past the caches where rows allow it; no bit depends on it.
  bool streaming = false;
};

// The row of the table that row `r` of the step is.
EHC_HD int64_t table_row(const OptimizerStepArgs& a, int64_t r) {
  return a.form == OptimizerStepArgs::Form::lazy ? row_at(a.touched, r) : r;
}

// Walks up the rows of a step and finds the gradient of each.
class GradientCursor {
 public:
  EHC_HD GradientCursor(const OptimizerStepArgs& a, int64_t begin) : args_(a) {
    if (a.form != OptimizerStepArgs::Form::sparse) return;
    int64_t high = a.touched.count;  // the first u with touched[u] >= begin
    while (next_ < high) {
      const int64_t middle = next_ + (high - next_) / 2;
      if (row_at(a.touched, middle) < begin) {
        next_ = middle + 1;
      } else {
        high = middle;
      }
    }
  }
  // Position among the gradients of row r, or -1. To be called for each row in turn.
  EHC_HD int64_t at(int64_t r) {
    if (args_.form != OptimizerStepArgs::Form::sparse) return r;
    const bool found = next_ < args_.touched.count && row_at(args_.touched, next_) == r;
    return found ? next_++ : -1;
  }

 private:
  const OptimizerStepArgs& args_;
  int64_t next_ = 0;
};

// Rows of at most so many columns can be summed by column while their momentum moves.
inline constexpr int64_t kMostSummedWidth = 1024;

// Step 1 for rows [begin, end): the update, the new momentum and the norms of the update, which go
// to row_scale; col_scale holds 1. Returns the sum of the norms, in row order. `sums` [hd], or
// null: the squares by column of the update whose rows have norm 1.
EHC_CPU_KERNEL(double optimizer_momentum_rows(const OptimizerStepArgs& args, int64_t begin,
                                              int64_t end, float* sums));
// Steps 4 and 5 for rows [begin, end).
EHC_CPU_KERNEL(void optimizer_weight_rows(const OptimizerStepArgs& args, int64_t begin,
                                          int64_t end));

}  // namespace ehc::engram
