// The formula, element by element.
#include "core/float_formats.h"
#include "ops/engram/momentum_update/momentum_update_math.h"

namespace ehc::engram {

void momentum_update_reference(const MomentumUpdateArgs& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t i = 0; i < a.width; ++i) {
      const Moved moved =
          move_element(a.factors, load_float(a.grad, a.grad_type, r * a.grad_stride + i),
                       load_float(a.momentum, a.momentum_type, r * a.momentum_stride + i));
      a.update[r * a.update_stride + i] = moved.update;
      store_float(a.new_momentum, a.momentum_type, r * a.new_momentum_stride + i, moved.momentum);
    }
  }
}

}  // namespace ehc::engram
