// The gains of one token, for loops and CUDA.
#pragma once

#include "ops/mhc/amax_gain/amax_gain_args.h"
#include "ops/mhc/shared/mix_map_math.h"

namespace ehc::mhc {

template <class Real>
struct MixMap {
  Real value[kMaxStreams][kMaxStreams];
};

template <class Real>
EHC_HD MapGains<Real> gains_of(const MixMap<Real>& map, int64_t n) {
  return map_gains<Real>(n, [&](int64_t i, int64_t o) { return map.value[i][o]; });
}

template <class Real>
EHC_HD MixMap<Real> read_map(const float* from, int64_t row_stride, int64_t n) {
  MixMap<Real> map;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t o = 0; o < n; ++o) map.value[i][o] = from[i * row_stride + o];
  }
  return map;
}

// a * b, each sum from its first product, ascending.
template <class Real>
EHC_HD MixMap<Real> product(const MixMap<Real>& a, const MixMap<Real>& b, int64_t n) {
  MixMap<Real> out;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t o = 0; o < n; ++o) out.value[i][o] = a.value[i][0] * b.value[0][o];
    for (int64_t k = 1; k < n; ++k) {
      for (int64_t o = 0; o < n; ++o) out.value[i][o] += a.value[i][k] * b.value[k][o];
    }
  }
  return out;
}

// `n` is args.streams, as a constant where the caller has one.
template <class Real>
EHC_HD void amax_gain_token(const AmaxGainArgs& args, int64_t token, int64_t n) {
  MixMap<Real> composite;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t o = 0; o < n; ++o) composite.value[i][o] = i == o ? 1 : 0;
  }
  for (int64_t l = 0; l < args.layers; ++l) {
    const auto map =
        read_map<Real>(args.comb + l * args.comb_layer_stride + token * args.comb_token_stride,
                       args.comb_row_stride, n);
    const MapGains<Real> gains = gains_of(map, n);
    args.forward.data[l * args.forward.layer_stride + token * args.forward.token_stride] =
        static_cast<float>(gains.forward);
    args.backward.data[l * args.backward.layer_stride + token * args.backward.token_stride] =
        static_cast<float>(gains.backward);
    composite = l == 0 ? map : product(composite, map, n);
  }
  const MapGains<Real> gains = gains_of(composite, n);
  args.composite_forward[token] = static_cast<float>(gains.forward);
  args.composite_backward[token] = static_cast<float>(gains.backward);
}

}  // namespace ehc::mhc
