// The formula, element by element.
#include <cstring>

#include "core/float_formats.h"
#include "ops/engram/gather/gather_args.h"

namespace ehc::engram {

void gather_fwd_reference(const GatherForwardArgs& a, int64_t begin, int64_t end) {
  const auto size = static_cast<int64_t>(size_of(a.out_type));
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t c = 0; c < a.columns; ++c) {
      const int64_t row = row_index(a.indices, t, c) * a.table_row_stride;
      const int64_t out = t * a.out_token_stride + c * a.width;
      for (int64_t i = 0; i < a.width; ++i) {
        if (row < 0) {
          store_float(a.out, a.out_type, out + i, 0.0F);
        } else if (a.table_type == a.out_type) {  // bytes: a NaN keeps its payload
          std::memcpy(static_cast<char*>(a.out) + (out + i) * size,
                      static_cast<const char*>(a.table) + (row + i) * size,
                      static_cast<size_t>(size));
        } else {
          store_float(a.out, a.out_type, out + i, load_float(a.table, a.table_type, row + i));
        }
      }
    }
  }
}

}  // namespace ehc::engram
