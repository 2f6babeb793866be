// Arguments of the sinkhorn kernels, also for the whole optimizer step.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"
#include "core/host_device.h"

namespace ehc::engram {

// x[r,j] = (row_scale[r] * update[r,j]) * col_scale[j]
struct ScaledUpdate {
  int64_t width = 0;              // hd
  const float* update = nullptr;  // F32[rows,hd]
  int64_t update_stride = 0;
  const float* row_scale = nullptr;  // F32[rows]
  const float* col_scale = nullptr;  // F32[hd]
  float eps = 0;
};

struct SinkhornStepArgs {
  ScaledUpdate x;
  // Rows of scale 0 are known to be finite and so to stay zeros: they need not be read, and their
  // norms are not written.
  bool skip_zero_scales = false;
  float* row_norm = nullptr;       // F32[rows], or null
  float* new_row_scale = nullptr;  // F32[rows], may be row_scale
  float* col_partial = nullptr;    // F32[P,hd]
  int64_t col_partial_stride = 0;
};

struct SinkhornReduceArgs {
  int64_t partials = 0;                // P
  const float* col_partial = nullptr;  // F32[P,hd]
  int64_t col_partial_stride = 0;
  float* col_sumsq = nullptr;        // F32[hd], or null
  const float* col_scale = nullptr;  // F32[hd], or null: only the sums
  float* new_col_scale = nullptr;    // F32[hd], may be col_scale
  float eps = 0;
};

struct SinkhornFinalizeArgs {
  ScaledUpdate x;
  float alpha = 0;
  float* out = nullptr;  // F32[rows,hd], may be the update
  int64_t out_stride = 0;
  // Store past the caches where rows allow it; no bit depends on it.
  bool streaming = false;
};

// Sums over rows are cut into at most 128 chunks of so many rows, of at least 32: a function of the
// number of rows alone.
EHC_HD int64_t sinkhorn_chunk_rows(int64_t rows) {
  const int64_t size = rows / 128 + (rows % 128 != 0 ? 1 : 0);
  return size > 32 ? size : 32;
}

EHC_HD int64_t sinkhorn_chunks(int64_t rows) {
  const int64_t size = sinkhorn_chunk_rows(rows);
  return rows / size + (rows % size != 0 ? 1 : 0);
}

// On CUDA a chunk is cut into so many parts, whose sums are added in ascending order.
inline constexpr int64_t kSinkhornParts = 4;

// Rows [begin, end), which are chunk `chunk`.
EHC_CPU_KERNEL(void sinkhorn_step_chunk(const SinkhornStepArgs& args, int64_t chunk, int64_t begin,
                                        int64_t end));
// Columns [begin, end).
EHC_CPU_KERNEL(void sinkhorn_reduce_columns(const SinkhornReduceArgs& args, int64_t begin,
                                            int64_t end));
// Rows [begin, end).
EHC_CPU_KERNEL(void sinkhorn_finalize_rows(const SinkhornFinalizeArgs& args, int64_t begin,
                                           int64_t end));

}  // namespace ehc::engram
