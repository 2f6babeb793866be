// The attributes that lead from a projection to the coefficients of a sublayer.
#pragma once

#include <tuple>

#include "core/schema_builder.h"

namespace ehc::mhc {

// For an operator whose struct has members of these names.
template <class P>
constexpr auto mix_group() {
  return std::tuple{attribute<&P::norm_eps>("norm_eps").positive(),
                    attribute<&P::pre_eps>("pre_eps").at_least(0),
                    attribute<&P::post_mult>("post_mult").at_least(0),
                    attribute<&P::repeat>("repeat").between(1, 64).fixes("repeat"),
                    attribute<&P::sinkhorn_eps>("sinkhorn_eps").at_least(0),
                    attribute<&P::convention>("convention", "deepseek/megatron/log"),
                    attribute<&P::rms>("rms", "mean/norm")};
}

}  // namespace ehc::mhc
