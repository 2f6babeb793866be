// engram.gather_dequant on CUDA (sm_80+).
//
//   e[t, c*hd:(c+1)*hd] = round(float(weight[r]) * 2^(scale[r] - 127)), r = indices[t,c]; zeros for
//   -1 weight [rows,hd], scale [rows,hd/group], indices [T,C], e [T,C*hd]
//
// Bytes: C*(hd + hd/group) + C*(index) read, C*hd elements written a token.
// Algorithm: row_format.cuh, with several rows of a thread on the way, which lie far apart. Class
// E.
#include "ops/engram/gather_dequant/gather_dequant_args.h"
#include "ops/engram/shared/row_format.cuh"
#include "ops/engram/shared/row_items.cuh"

namespace ehc::engram {

void gather_dequant_cuda(const GatherDequantArgs& a, int64_t tokens, int device, void* stream) {
  if (tokens == 0 || a.columns == 0) return;
  const RowItems items = row_items(a.indices, tokens, a.columns, a.width, a.token_stride);
  const CodedRows coded = {a.weight, a.scale, a.weight_stride, a.scale_stride, a.width, a.group};
  decode_rows_of("engram.gather_dequant", items, coded, a.embedding, a.type,
                 are_aligned(items, a.embedding, a.type), device, stream);
}

}  // namespace ehc::engram
