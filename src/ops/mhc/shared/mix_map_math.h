// Line sums of a mixing map [input stream, output stream], for loops and CUDA. Where the number of
// streams is a constant, everything unrolls.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

// Over the output streams of each input stream, and over the input streams of each output stream.
template <class Real>
struct LineSums {
  Real row[kMaxStreams], column[kMaxStreams];
};

// From +0, in ascending order. `entry(i, o)` is what is added.
template <class Real, class Entry>
EHC_HD LineSums<Real> line_sums(int64_t n, const Entry& entry) {
  LineSums<Real> sums;
  for (int64_t k = 0; k < n; ++k) sums.row[k] = sums.column[k] = 0;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t o = 0; o < n; ++o) {
      const Real x = entry(i, o);
      sums.row[i] += x;
      sums.column[o] += x;
    }
  }
  return sums;
}

// The largest of the n values size(line), each >= 0; NaN wins.
template <class Real, class Size>
EHC_HD Real largest(int64_t n, const Real* line, const Size& size) {
  Real most = 0;
  for (int64_t k = 0; k < n; ++k) {
    const Real x = size(line[k]);
    const Real larger = most > x ? most : x;
    most = __builtin_isnan(most) ? most : larger;
  }
  return most;
}

// How much the largest value of a column of streams can grow: forward to the output streams,
// backward to the input streams.
template <class Real>
struct MapGains {
  Real forward, backward;
};

// `map(i, o)` is an entry.
template <class Real, class Map>
EHC_HD MapGains<Real> map_gains(int64_t n, const Map& map) {
  const auto sums = line_sums<Real>(n, [&](int64_t i, int64_t o) { return magnitude(map(i, o)); });
  const auto same = [](Real x) { return x; };
  return {largest(n, sums.column, same), largest(n, sums.row, same)};
}

}  // namespace ehc::mhc
