// Line sums of a mixing map [input stream, output stream], for scalar loops and CUDA.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace ehc::mhc {

// The larger one; NaN wins.
template <class Real>
EHC_HD Real larger(Real a, Real b) {
  return b > a || b != b ? b : a;
}

// The largest over the n lines of size(sum of entry(line, k) over k), from +0.
template <class Real, class Entry, class Size>
EHC_HD Real largest_line(int64_t n, const Entry& entry, const Size& size) {
  Real largest = 0;
  for (int64_t line = 0; line < n; ++line) {
    Real sum = 0;
    for (int64_t k = 0; k < n; ++k) sum += entry(line, k);
    largest = larger(largest, size(sum));
  }
  return largest;
}

// Both gains of a map: how much the largest value of a column of streams can grow, forward (lines
// are output streams) and backward (lines are input streams).
template <class Real>
struct MapGains {
  Real forward, backward;
};

// `map(i, o)` is an entry.
template <class Real, class Map>
EHC_HD MapGains<Real> map_gains(int64_t n, const Map& map) {
  const auto same = [](Real sum) { return sum; };
  return {largest_line<Real>(
              n, [&](int64_t o, int64_t i) { return magnitude(map(i, o)); }, same),
          largest_line<Real>(
              n, [&](int64_t i, int64_t o) { return magnitude(map(i, o)); }, same)};
}

}  // namespace ehc::mhc
