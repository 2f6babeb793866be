// The new streams at one column, for scalar loops and CUDA; post_simd.h has it on lanes. The order
// of operations is part of the contract.
//
//   x'_o = c_o y + sum_i a_io b_i    the rounded product first, then ascending i by fma
//   grad_y = sum_o c_o g_o, grad_b_i = sum_o a_io g_o    ascending o from +0 by fma
//   grad_c_o = sum over columns of y g_o, grad_a_io = sum over columns of b_i g_o
#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

// Stream o of the new ones; `comb(i)` is its coefficient of stream i, `b(i)` stream i at the
// column.
template <class Real, class Coefficient, class Column>
EHC_HD Real post_column(Real post, const Coefficient& comb, int64_t streams, Real y,
                        const Column& b) {
  Real sum = post * y;
  each_stream(streams, [&](int64_t i) {
    sum = std::fma(static_cast<Real>(comb(i)), static_cast<Real>(b(i)), sum);
  });
  return sum;
}

}  // namespace ehc::mhc
