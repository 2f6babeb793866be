// The collapse of the streams at one column, for scalar loops and CUDA; pre_apply_simd.h has it on
// lanes. The order of operations is part of the contract.
//
//   o = sum_i pre_i x_i    ascending i from +0, by fma
//   grad_x_i = target + pre_i g    by fma    grad_pre_i = sum over columns of g x_i
#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

// `pre(i)` and `x(i)` are coefficient and value of stream i at the column.
template <class Real, class Coefficient, class Column>
EHC_HD Real pre_apply_column(const Coefficient& pre, int64_t streams, const Column& x) {
  Real sum = 0;
  each_stream(streams, [&](int64_t i) {
    sum = std::fma(static_cast<Real>(pre(i)), static_cast<Real>(x(i)), sum);
  });
  return sum;
}

}  // namespace ehc::mhc
