// engram.dequant_rows on CUDA (sm_80+).
//
//   values[r, i] = round(float(weight[r, i]) * 2^(scale[r, i / group] - 127))
//   weight [rows, hd], scale [rows, hd/group], values [rows, hd]
//
// Bytes: hd + hd/group read, hd elements written a row. Algorithm: row_format.cuh. Class E.
#include "ops/engram/dequant_rows/dequant_rows_args.h"
#include "ops/engram/shared/row_format.cuh"

namespace ehc::engram {

namespace {

struct AllRows {
  int64_t rows;
  int64_t out_stride;
  __host__ __device__ __forceinline__ int64_t count() const { return rows; }
  __device__ __forceinline__ int64_t index(int64_t item) const { return item; }
  __device__ __forceinline__ int64_t out(int64_t item) const { return item * out_stride; }
};

}  // namespace

void dequant_rows_cuda(const DequantRowsArgs& a, int64_t rows, int device, void* stream) {
  if (rows == 0) return;
  const CodedRows coded = {a.weight, a.scale, a.weight_stride, a.scale_stride, a.width, a.group};
  decode_rows_of("engram.dequant_rows", AllRows{rows, a.values_stride}, coded, a.values, a.type,
                 are_aligned(a.values, a.values_stride, size_of(a.type)), device, stream);
}

}  // namespace ehc::engram
