// mhc.multilayer_recompute by its definition: pre_apply and post, layer after layer, in double and
// in float.
#include "ops/mhc/multilayer_recompute/multilayer_recompute_args.h"
#include "ops/mhc/post/post_args.h"
#include "ops/mhc/pre_apply/pre_apply_args.h"

namespace ehc::mhc {

template <class Real>
void recompute_reference(const RecomputeArgs& a, const Tile& tile) {
  StreamRows x = a.residual;
  for (int64_t l = 0; l < a.layer_count; ++l) {
    const RecomputeLayer& layer = a.layers[l];
    pre_apply_fwd_reference<Real>(
        {.sizes = a.sizes, .residual = x, .pre = layer.pre, .layer_input = layer.layer_input},
        tile);
    if (!layer.has_post) return;
    post_fwd_reference<Real>({.sizes = a.sizes,
                              .layer_output = layer.layer_output,
                              .residual = x,
                              .post = layer.post,
                              .comb = layer.comb,
                              .new_residual = layer.new_residual},
                             tile);
    x = layer.new_residual;
  }
}

template void recompute_reference<double>(const RecomputeArgs&, const Tile&);
template void recompute_reference<float>(const RecomputeArgs&, const Tile&);

}  // namespace ehc::mhc
