// mhc.defect in plain loops, in double and in float.
#include "ops/mhc/defect/defect_math.h"

namespace ehc::mhc {

template <class Real>
void defect_reference(const DefectArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) defect_token<Real>(a, t, a.streams);
}

template void defect_reference<double>(const DefectArgs&, int64_t, int64_t);
template void defect_reference<float>(const DefectArgs&, int64_t, int64_t);

}  // namespace ehc::mhc
