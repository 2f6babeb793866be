// engram.hash on the CPU. Work is cut into (layer, order, up to 64 heads), whose reciprocals fit on
// the stack; for each the tokens run innermost. Bytes per token: 4*Nmax read, 4*L*C written.
#include "ops/engram/hash/hash_args.h"
#include "ops/engram/hash/hash_math.h"

namespace ehc::engram::EHC_ISA {

void hash_rows(const HashArgs& a, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = 64;
  Divisor divisors[kBlock];
  for (int64_t l = 0; l < a.layers; ++l) {
    const int64_t* multipliers = a.multipliers + l * (a.orders + 1);
    for (int64_t order = 0; order < a.orders; ++order) {
      for (int64_t first = 0; first < a.heads; first += kBlock) {
        const int64_t heads = a.heads - first < kBlock ? a.heads - first : kBlock;
        const int64_t c = order * a.heads + first;
        const int64_t column = l * a.orders * a.heads + c;
        for (int64_t j = 0; j < heads; ++j) divisors[j] = make_divisor(a.sizes[column + j]);
        for (int64_t t = begin; t < end; ++t) {
          const int32_t* window = a.window + t * a.window_stride;
          const bool masked = a.mask != nullptr && a.mask[t] != 0;
          uint64_t key = 0;
          for (int64_t k = 0; k <= order + 1; ++k) key = hash_step(key, window[k], multipliers[k]);
          const int64_t at = l * a.layer_stride + t * a.token_stride + c;
          for (int64_t j = 0; j < heads; ++j) {
            const int64_t index = floored_remainder(key, divisors[j]) + hash_offset(a, column + j);
            store_index(a, at + j, masked ? -1 : index);
          }
        }
      }
    }
  }
}

}  // namespace ehc::engram::EHC_ISA
