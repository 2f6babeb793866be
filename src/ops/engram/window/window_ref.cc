// Sequence by sequence, token by token, slot by slot.
#include "ops/engram/window/window_math.h"

namespace ehc::engram {

void window_reference(const WindowArgs& a) {
  for (int64_t sequence = 0; sequence < a.sequences; ++sequence) {
    const int64_t start = sequence_start(a, sequence);
    for (int64_t t = start; t < sequence_end(a, sequence); ++t) {
      window_row(a, a.max_ngram, t, sequence, start);
    }
  }
}

}  // namespace ehc::engram
