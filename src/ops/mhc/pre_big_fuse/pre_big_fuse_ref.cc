// The norm of a layer's input in plain loops, in double and in float.
#include "ops/mhc/pre_big_fuse/pre_big_fuse_args.h"
#include "ops/mhc/shared/rms_math.h"
#include "ops/mhc/shared/stream_reference.h"

namespace ehc::mhc {

template <class Real>
void layer_norm_reference(const LayerNormArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    Real squares = 0;
    for (int64_t c = 0; c < a.sizes.hidden; ++c) {
      const Real x = load(a.sizes, a.rows, t, 0, c);
      squares += x * x;
    }
    const auto factor = rms_factor<Real>({a.sizes.hidden, a.eps, false}, squares);
    for (int64_t c = 0; c < a.sizes.hidden; ++c) {
      const Real x = load(a.sizes, a.rows, t, 0, c);
      store(a.sizes, a.out, t, 0, c,
            x * factor * static_cast<Real>(load_float(a.weight, a.weight_type, c)));
    }
  }
}

template void layer_norm_reference<double>(const LayerNormArgs&, int64_t, int64_t);
template void layer_norm_reference<float>(const LayerNormArgs&, int64_t, int64_t);

}  // namespace ehc::mhc
