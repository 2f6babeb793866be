// Slot by slot, straight from the list of what blocks a slot in include/ehc/engram/window.h; shares
// no code with the fast path.
#include "ops/engram/window/window_args.h"

namespace ehc::engram {

namespace {

constexpr int32_t kNone = -1;

// The id `back` positions before token t of a sequence that starts at `start`; kNone where there is
// none, or an image token.
int32_t id_before(const WindowArgs& a, int64_t sequence, int64_t start, int64_t t, int64_t back) {
  if (t - back >= start) {
    const bool is_image = a.mask != nullptr && a.mask[t - back] != 0;
    return is_image ? kNone : a.ids[t - back];
  }
  if (a.history == nullptr) return kNone;
  const int64_t kept = a.max_ngram - 1;  // history[kept - 1] is the id right before the sequence
  return a.history[sequence * kept + kept + (t - back - start)];
}

}  // namespace

void window_reference(const WindowArgs& a) {
  for (int64_t sequence = 0; sequence < a.sequences; ++sequence) {
    const int64_t start = a.cu_seqlens != nullptr ? a.cu_seqlens[sequence] : 0;
    const int64_t end = a.cu_seqlens != nullptr ? a.cu_seqlens[sequence + 1] : a.tokens;
    for (int64_t t = start; t < end; ++t) {
      for (int64_t slot = 0; slot < a.max_ngram; ++slot) {
        const int32_t id = id_before(a, sequence, start, t, slot);
        bool blocked = id < 0;
        for (int64_t nearer = 0; nearer < slot; ++nearer) {
          const int32_t other = id_before(a, sequence, start, t, nearer);
          if (a.farther && other < 0) blocked = true;
          if (a.reset_id >= 0 && nearer >= 1 && other == a.reset_id) blocked = true;
        }
        a.window[t * a.window_stride + slot] = blocked ? a.pad_id : id;
      }
    }
  }
}

}  // namespace ehc::engram
