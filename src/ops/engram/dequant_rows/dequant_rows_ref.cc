// The formula, element by element.
#include "ops/engram/dequant_rows/dequant_rows_args.h"
#include "ops/engram/shared/row_format.h"

namespace ehc::engram {

void dequant_rows_reference(const DequantRowsArgs& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t i = 0; i < a.width; ++i) {
      const uint8_t scale = a.scale[r * a.scale_stride + i / a.group];
      store_float(a.values, a.type, r * a.values_stride + i,
                  decode_weight(a.weight[r * a.weight_stride + i], scale));
    }
  }
}

}  // namespace ehc::engram
