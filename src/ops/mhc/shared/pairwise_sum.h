// The one order in which partial sums of splits are added.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace ehc::mhc {

EHC_HD float add(float x, float y) { return x + y; }
EHC_HD double add(double x, double y) { return x + y; }

// load(0) + ... + load(count - 1): adjacent pairs, an odd last one moves up unchanged, until one is
// left. `zero` when there is none. Value has an add(x, y).
template <class Value, class Load>
EHC_HD Value pairwise_sum(int64_t count, Value zero, const Load& load) {
  if (count == 0) return zero;
  // Sums of 2^level neighbours that wait for their right-hand side: those levels that are bits of
  // the number of values so far.
  Value waiting[63];
  for (int64_t i = 0; i < count - 1; ++i) {
    Value sum = load(i);
    int level = 0;
    for (; (i >> level & 1) != 0; ++level) sum = add(waiting[level], sum);
    waiting[level] = sum;
  }
  Value sum = load(count - 1);
  for (int level = 0; (count - 1) >> level != 0; ++level) {
    if (((count - 1) >> level & 1) != 0) sum = add(waiting[level], sum);
  }
  return sum;
}

}  // namespace ehc::mhc
