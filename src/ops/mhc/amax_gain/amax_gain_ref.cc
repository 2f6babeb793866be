// mhc.amax_gain in plain loops, in double and in float.
#include "ops/mhc/amax_gain/amax_gain_args.h"
#include "ops/mhc/shared/mix_map_math.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

namespace {

template <class Real>
struct Matrix {
  Real value[kMaxStreams][kMaxStreams];
};

template <class Real>
Matrix<Real> unit(int64_t n) {
  Matrix<Real> m = {};
  for (int64_t i = 0; i < n; ++i) m.value[i][i] = 1;
  return m;
}

template <class Real>
Matrix<Real> product(const Matrix<Real>& a, const Matrix<Real>& b, int64_t n) {
  Matrix<Real> out = {};
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t k = 0; k < n; ++k) {
      for (int64_t o = 0; o < n; ++o) out.value[i][o] += a.value[i][k] * b.value[k][o];
    }
  }
  return out;
}

template <class Real>
MapGains<Real> gains_of(const Matrix<Real>& m, int64_t n) {
  return map_gains<Real>(n, [&](int64_t i, int64_t o) { return m.value[i][o]; });
}

}  // namespace

template <class Real>
void amax_gain_reference(const AmaxGainArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    Matrix<Real> composite = unit<Real>(a.streams);
    for (int64_t l = 0; l < a.layers; ++l) {
      const float* comb = a.comb + l * a.comb_layer_stride + t * a.comb_token_stride;
      Matrix<Real> map;
      for (int64_t i = 0; i < a.streams; ++i) {
        for (int64_t o = 0; o < a.streams; ++o) map.value[i][o] = comb[i * a.comb_row_stride + o];
      }
      const MapGains<Real> gains = gains_of(map, a.streams);
      const auto store = [&](const LayerGains& to, Real x) {
        to.data[l * to.layer_stride + t * to.token_stride] = static_cast<float>(x);
      };
      store(a.forward, gains.forward);
      store(a.backward, gains.backward);
      composite = l == 0 ? map : product(composite, map, a.streams);
    }
    const MapGains<Real> gains = gains_of(composite, a.streams);
    a.composite_forward[t] = static_cast<float>(gains.forward);
    a.composite_backward[t] = static_cast<float>(gains.backward);
  }
}

template void amax_gain_reference<double>(const AmaxGainArgs&, int64_t, int64_t);
template void amax_gain_reference<float>(const AmaxGainArgs&, int64_t, int64_t);

}  // namespace ehc::mhc
