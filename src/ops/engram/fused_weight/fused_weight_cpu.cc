// engram.fused_weight: wf[h,i] = wh[h,i] * we[h,i] in fp32. Class E: one product, exact for bf16.
// Bytes: n*d*(the two weights' elements + 4).
#include <type_traits>

#include "backends/cpu/simd.h"
#include "ops/engram/fused_weight/fused_weight_args.h"

namespace ehc::engram::EHC_ISA {
namespace {

namespace simd = ehc::simd::EHC_ISA;
using simd::Bf16;
using simd::kPair;

// A row of W as fp32 in the lane order of Order, which is W or, beside fp32, Bf16.
template <class Order, class W>
EHC_SIMD simd::Pair load_weight(const W* p, int64_t count) {
  if constexpr (sizeof(W) == sizeof(float)) {
    return simd::load_f32_some<Order>(p, count);
  } else {
    return simd::load_some(p, count);
  }
}

template <class Hidden, class Embed>
inline void fuse(const FusedWeightArgs& args, int64_t begin, int64_t end) {
  constexpr bool kBothF32 = sizeof(Hidden) == sizeof(float) && sizeof(Embed) == sizeof(float);
  using Order = std::conditional_t<kBothF32, float, Bf16>;
  for (int64_t h = 0; h < args.streams; ++h) {
    const auto* hidden =
        static_cast<const Hidden*>(args.hidden_weight) + h * args.hidden_weight_stream_stride;
    const auto* embed =
        static_cast<const Embed*>(args.embed_weight) + h * args.embed_weight_stream_stride;
    float* fused = args.fused + h * args.fused_stream_stride;
    for (int64_t i = begin; i < end; i += kPair) {
      const int64_t count = end - i;
      const simd::Pair x =
          mul(load_weight<Order>(hidden + i, count), load_weight<Order>(embed + i, count));
      simd::store_some(fused + i, simd::natural_order<Order>(x), count, false);
    }
  }
}

template <class Hidden>
inline void fuse_with(const FusedWeightArgs& args, int64_t begin, int64_t end) {
  if (args.embed_type == DType::f32) return fuse<Hidden, float>(args, begin, end);
  return fuse<Hidden, Bf16>(args, begin, end);
}

}  // namespace

void fused_weight_columns(const FusedWeightArgs& args, int64_t begin, int64_t end) {
  if (args.hidden_type == DType::f32) return fuse_with<float>(args, begin, end);
  return fuse_with<Bf16>(args, begin, end);
}

}  // namespace ehc::engram::EHC_ISA
