// parallel_for over the threads of a context.
#pragma once

#include <algorithm>

#include "ehc/context.h"

namespace ehc {

// Calls body(begin, end) over [0, count), in pieces of at least `grain`. Pieces depend on the
// number of threads, so a body must give the same bits for any pieces: sums that cross them are
// split by shape instead (see parallel_chunks).
template <class Body>
void parallel_for(Context& context, int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  Executor& executor = context.executor();
  const int64_t most = std::max<int64_t>(1, count / std::max<int64_t>(1, grain));
  const int64_t pieces = std::min<int64_t>(executor.concurrency(), most);
  if (pieces == 1) {
    body(int64_t{0}, count);
    return;
  }
  executor.run(pieces,
               [&](int64_t piece) { body(count * piece / pieces, count * (piece + 1) / pieces); });
}

// Calls body(chunk, begin, end) for chunks of exactly `size` (the last may be shorter), whatever
// the number of threads.
template <class Body>
void parallel_chunks(Context& context, int64_t count, int64_t size, const Body& body) {
  const int64_t chunks = (count + size - 1) / size;
  context.executor().run(chunks, [&](int64_t chunk) {
    body(chunk, chunk * size, std::min(count, (chunk + 1) * size));
  });
}

}  // namespace ehc
