// The formula, element by element.
#include "ops/engram/gather_dequant/gather_dequant_args.h"
#include "ops/engram/shared/row_format.h"

namespace ehc::engram {

void gather_dequant_reference(const GatherDequantArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t c = 0; c < a.columns; ++c) {
      const int64_t row = row_index(a.indices, t, c);
      for (int64_t i = 0; i < a.width; ++i) {
        const float x = row < 0 ? 0.0F
                                : decode_weight(a.weight[row * a.weight_stride + i],
                                                a.scale[row * a.scale_stride + i / a.group]);
        store_float(a.embedding, a.type, t * a.token_stride + c * a.width + i, x);
      }
    }
  }
}

}  // namespace ehc::engram
