// engram.momentum_update on SIMD lanes.
//
//   m' = fma(m, beta, round((1 - beta) g)), A = fma(g, 1 - beta, round(beta m')) or m'
//   grad, momentum, new momentum W[rows,hd], A F32[rows,hd]
//
// Bytes: grad + 2 * momentum + 4 an element. Class E: the formula fixes every rounding.
#include "ops/engram/momentum_update/momentum_update_simd.h"

namespace ehc::engram::EHC_ISA {
namespace {

template <bool kNesterov, class Grad, class Momentum>
inline void move_rows(const MomentumUpdateArgs& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const MomentumRow<Grad, Momentum> row = {
        static_cast<const Grad*>(a.grad) + r * a.grad_stride,
        static_cast<const Momentum*>(a.momentum) + r * a.momentum_stride,
        static_cast<Momentum*>(a.new_momentum) + r * a.new_momentum_stride,
        a.update + r * a.update_stride};
    move_row<kNesterov>(a.factors, row, a.width, a.streaming,
                        [](int64_t, Pair, int64_t) EHC_SIMD_LAMBDA {});
  }
  if (a.streaming) simd::stream_fence();
}

}  // namespace

void momentum_update_rows(const MomentumUpdateArgs& args, int64_t begin, int64_t end) {
  with_weight(args.grad_type, [&](auto grad) {
    with_weight(args.momentum_type, [&](auto momentum) {
      if (args.factors.nesterov) {
        move_rows<true, decltype(grad), decltype(momentum)>(args, begin, end);
      } else {
        move_rows<false, decltype(grad), decltype(momentum)>(args, begin, end);
      }
    });
  });
}

}  // namespace ehc::engram::EHC_ISA
