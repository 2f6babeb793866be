// The formula, with the processor's own division.
#include "ops/engram/hash/hash_math.h"

namespace ehc::engram {

void hash_reference(const HashArgs& a, int64_t begin, int64_t end) {
  for (int64_t l = 0; l < a.layers; ++l) {
    for (int64_t t = begin; t < end; ++t) {
      const int32_t* window = a.window + t * a.window_stride;
      const int64_t* multipliers = a.multipliers + l * (a.orders + 1);
      uint64_t key = hash_step(0, window[0], multipliers[0]);
      for (int64_t order = 0; order < a.orders; ++order) {
        key = hash_step(key, window[order + 1], multipliers[order + 1]);
        for (int64_t head = 0; head < a.heads; ++head) {
          const int64_t c = order * a.heads + head;
          const int64_t column = l * a.orders * a.heads + c;
          const int64_t size = a.sizes[column];
          const int64_t remainder = static_cast<int64_t>(key) % size;
          const int64_t floored = remainder < 0 ? remainder + size : remainder;
          const bool masked = a.mask != nullptr && a.mask[t] != 0;
          store_index(a, l * a.layer_stride + t * a.token_stride + c,
                      masked ? -1 : floored + hash_offset(a, column));
        }
      }
    }
  }
}

}  // namespace ehc::engram
