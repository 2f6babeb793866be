// The defect of one token's map, for loops and CUDA.
#pragma once

#include "ops/mhc/defect/defect_args.h"
#include "ops/mhc/shared/mix_map_math.h"

namespace ehc::mhc {

// `n` is args.streams, as a constant where the caller has one.
template <class Real>
EHC_HD void defect_token(const DefectArgs& args, int64_t token, int64_t n) {
  const float* comb = args.comb.data + token * args.comb.token_stride;
  const auto map = [&](int64_t i, int64_t o) {
    return static_cast<Real>(comb[i * args.comb.row_stride + o]);
  };
  const auto off_one = [](Real sum) { return magnitude(sum - 1); };
  const LineSums<Real> sums = line_sums<Real>(n, map);
  const MapGains<Real> gains = map_gains<Real>(n, map);
  args.row_defect[token] = static_cast<float>(largest(n, sums.row, off_one));
  args.column_defect[token] = static_cast<float>(largest(n, sums.column, off_one));
  args.spectral_bound[token] = static_cast<float>(square_root(gains.forward * gains.backward));
}

}  // namespace ehc::mhc
