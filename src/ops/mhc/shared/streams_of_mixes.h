// n of the N = n*n + 2n mixes of a token.
#pragma once

#include "core/bind.h"

namespace ehc::mhc {

// -1 when there is no such n.
constexpr int64_t streams_of_mixes(int64_t mixes) {
  int64_t n = 1;
  while (n * n + 2 * n < mixes) ++n;
  return n * n + 2 * n == mixes ? n : -1;
}

// For an operator whose inputs say N and not n.
inline void set_streams(const Schema& schema, Bound& bound, const Tensor& mixes) {
  const int64_t n = streams_of_mixes(bound["N"]);
  if (n < 0) fail_tensor(schema, "mixes", "N = n*n + 2*n columns", describe(mixes));
  bound.symbols.set(symbol("n"), n);
}

}  // namespace ehc::mhc
