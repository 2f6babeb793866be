// mhc.amax_gain in plain loops, in double and in float.
#include "ops/mhc/amax_gain/amax_gain_math.h"

namespace ehc::mhc {

template <class Real>
void amax_gain_reference(const AmaxGainArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) amax_gain_token<Real>(a, t, a.streams);
}

template void amax_gain_reference<double>(const AmaxGainArgs&, int64_t, int64_t);
template void amax_gain_reference<float>(const AmaxGainArgs&, int64_t, int64_t);

}  // namespace ehc::mhc
