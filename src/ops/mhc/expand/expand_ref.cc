// mhc.expand_fwd as a copy, mhc.expand_bwd in plain loops, in double and in float.
#include <cstring>

#include "ops/mhc/expand/expand_args.h"
#include "ops/mhc/pre_apply/pre_apply_args.h"
#include "ops/mhc/shared/stream_reference.h"

namespace ehc::mhc {

// Bytes, not values: a NaN keeps its payload.
void expand_fwd_reference(const ExpandForwardArgs& a, const Tile& tile) {
  const auto size = static_cast<int64_t>(size_of(a.sizes.activation));
  const auto bytes = static_cast<size_t>((tile.column_end - tile.column_begin) * size);
  for (int64_t t = tile.token_begin; t < tile.token_end; ++t) {
    for (int64_t i = 0; i < a.sizes.streams; ++i) {
      std::memcpy(
          static_cast<char*>(a.residual.data) + at(a.residual, t, i, tile.column_begin) * size,
          static_cast<const char*>(a.hidden.data) + at(a.hidden, t, 0, tile.column_begin) * size,
          bytes);
    }
  }
}

// Without a look at the coefficients.
template <class Real>
void expand_bwd_reference(const PreApplyForwardArgs& a, const Tile& tile) {
  for (int64_t t = tile.token_begin; t < tile.token_end; ++t) {
    for (int64_t c = tile.column_begin; c < tile.column_end; ++c) {
      Real sum = 0;
      for (int64_t i = 0; i < a.sizes.streams; ++i) sum += load(a.sizes, a.residual, t, i, c);
      store(a.sizes, a.layer_input, t, 0, c, sum);
    }
  }
}

template void expand_bwd_reference<double>(const PreApplyForwardArgs&, const Tile&);
template void expand_bwd_reference<float>(const PreApplyForwardArgs&, const Tile&);

}  // namespace ehc::mhc
