// A cut of the tokens of a call into one piece per thread, known before anything runs, so that each
// piece can have scratch of its own. No bit of a result may depend on the cut.
#pragma once

#include <algorithm>

#include "ehc/context.h"

namespace ehc {

struct Pieces {
  int64_t total;
  int64_t count;

  // At most one piece per thread of the context, each of at least `grain`.
  Pieces(const Context& context, int64_t total_count, int64_t grain)
      : total(total_count),
        count(std::clamp<int64_t>(total / grain, 1, context.executor().concurrency())) {}

  [[nodiscard]] int64_t longest() const { return (total + count - 1) / count; }

  // Calls body(piece, begin, end) for all pieces.
  template <class Body>
  void run(Context& context, const Body& body) const {
    if (total == 0) return;
    const auto piece = [&](int64_t p) { body(p, total * p / count, total * (p + 1) / count); };
    if (count == 1) {
      piece(0);
    } else {
      context.executor().run(count, piece);
    }
  }
};

}  // namespace ehc
