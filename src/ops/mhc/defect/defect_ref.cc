// mhc.defect in plain loops, in double and in float.
#include "ops/mhc/defect/defect_args.h"
#include "ops/mhc/shared/mix_map_math.h"
#include "ops/mhc/shared/stream_reference.h"

namespace ehc::mhc {

template <class Real>
void defect_reference(const DefectArgs& a, int64_t begin, int64_t end) {
  const auto off_one = [](Real sum) { return magnitude(sum - 1); };
  for (int64_t t = begin; t < end; ++t) {
    const auto map = [&](int64_t i, int64_t o) { return static_cast<Real>(load(a.comb, t, i, o)); };
    const auto transposed = [&](int64_t o, int64_t i) { return map(i, o); };
    const MapGains<Real> gains = map_gains<Real>(a.streams, map);
    a.row_defect[t] = static_cast<float>(largest_line<Real>(a.streams, map, off_one));
    a.column_defect[t] = static_cast<float>(largest_line<Real>(a.streams, transposed, off_one));
    a.spectral_bound[t] = static_cast<float>(square_root(gains.forward * gains.backward));
  }
}

template void defect_reference<double>(const DefectArgs&, int64_t, int64_t);
template void defect_reference<float>(const DefectArgs&, int64_t, int64_t);

}  // namespace ehc::mhc
