// The ways to split work over the threads of a context.
#pragma once

#include <algorithm>

#include "ehc/context.h"

namespace ehc {

// A cut of [0, total) into one piece per thread, known before anything runs, so that each piece can
// have scratch of its own. No bit of a result may depend on the cut: sums that cross it are split
// by shape instead (see parallel_chunks).
struct Pieces {
  int64_t total;
  int64_t count;

  // At most one piece per thread of the context, each of at least `grain`.
  Pieces(const Context& context, int64_t total_count, int64_t grain)
      : total(total_count),
        count(std::clamp<int64_t>(total / std::max<int64_t>(grain, 1), 1,
                                  context.executor().concurrency())) {}

  [[nodiscard]] int64_t longest() const { return (total + count - 1) / count; }

  // Calls body(piece, begin, end) for all pieces; nothing when there is nothing to cut.
  template <class Body>
  void run(Context& context, const Body& body) const {
    if (total <= 0) return;
    const auto piece = [&](int64_t p) { body(p, total * p / count, total * (p + 1) / count); };
    if (count == 1) {
      piece(0);
    } else {
      context.executor().run(count, piece);
    }
  }
};

// Calls body(begin, end) over [0, count), cut into Pieces of at least `grain`.
template <class Body>
void parallel_for(Context& context, int64_t count, int64_t grain, const Body& body) {
  Pieces(context, count, grain).run(context, [&](int64_t, int64_t begin, int64_t end) {
    body(begin, end);
  });
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
