// From the tensors of a call to rows of sums, whose axis G may be missing.
#pragma once

#include "ehc/mhc/reduce_partials.h"
#include "ehc/tensor.h"
#include "ops/mhc/shared/group_rows.h"
#include "ops/mhc/shared/rms_math.h"

namespace ehc::mhc {

// F32[T,G,M] or F32[T,G], whose rank with the axis G is `full_rank`.
inline GroupRows group_rows(const Tensor& t, int full_rank) {
  return {t.as<float>(), 0, t.stride[0], t.rank == full_rank ? t.stride[1] : 0};
}

// F32[S,T,G,M] or F32[S,T,G]
inline GroupRows partial_rows(const Tensor& t, int full_rank) {
  return {t.as<float>(), t.stride[0], t.stride[1], t.rank == full_rank ? t.stride[2] : 0};
}

// Of one group of `width` columns.
template <class P>
Rms rms_of(const P& p, int64_t width) {
  return {width, static_cast<float>(*p.norm_eps), p.rms == RmsForm::norm};
}

}  // namespace ehc::mhc
