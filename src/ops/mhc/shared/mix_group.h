// The attributes that lead from a projection to the coefficients of a sublayer, and what the
// iteration that they describe costs.
#pragma once

#include <string_view>
#include <tuple>

#include "core/schema_builder.h"

namespace ehc::mhc {

// Operations of Sinkhorn's iteration for `flops`.
inline constexpr std::string_view kSinkhornFlops = "T*((2*repeat-1)*(2*n*n+n)+4*n*n)";
inline constexpr std::string_view kSinkhornBackwardFlops = "3*T*((2*repeat-1)*(2*n*n+n)+4*n*n)";

// Of a struct with members of these names: the operator's own, or one in it that `Members` lead to.
template <class Rules, auto... Members>
constexpr auto mix_group() {
  return std::tuple{
      attribute<Members..., &Rules::norm_eps>("norm_eps").positive(),
      attribute<Members..., &Rules::pre_eps>("pre_eps").at_least(0),
      attribute<Members..., &Rules::post_mult>("post_mult").at_least(0),
      attribute<Members..., &Rules::repeat>("repeat").between(1, 64).fixes("repeat"),
      attribute<Members..., &Rules::sinkhorn_eps>("sinkhorn_eps").at_least(0),
      attribute<Members..., &Rules::convention>("convention", "deepseek/megatron/log"),
      attribute<Members..., &Rules::rms>("rms", "mean/norm")};
}

}  // namespace ehc::mhc
