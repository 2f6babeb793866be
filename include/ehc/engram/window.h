// engram.window: the ids that the n-gram hash of each token looks at.
#pragma once

#include <cstdint>
#include <optional>

#include "ehc/context.h"
#include "ehc/export.h"
#include "ehc/table.h"
#include "ehc/tensor.h"

namespace ehc::engram {

using Blocking = tables::WindowBlocking;

// window[t, k] is the id k positions before token t in the same sequence: an element of `ids`, or
// of `history` before the start of the sequence. A slot is blocked and shows `pad_id` when
//   - it lies before the start of the sequence and there is no history for it,
//   - its id is negative (so -1 in `history` means "none"),
//   - it is an image token, slot 0 included,
//   - blocking = farther: any nearer slot is blocked,
//   - reset_id >= 0: any nearer slot k >= 1 shows reset_id. Slot 0 with reset_id still looks back.
// Exact. Bytes per token: 4 read, 4*Nmax written. Contract 1.2.
//
// A sequence that is fed in pieces, each with the last Nmax-1 ids before it as history (-1 for an
// image token), gives the rows of one pass.
struct Window {
  Tensor ids{};               // I32[T], compressed ids
  Tensor cu_seqlens{};        // I32[B+1], optional: from 0, not decreasing, to T; else B = 1
  Tensor history{};           // I32[B, Nmax-1], optional: oldest first
  Tensor image_token_mask{};  // BOOL[T], optional
  std::optional<int64_t> max_ngram{};  // Nmax, 2..8, required
  std::optional<int64_t> pad_id{};     // 0..2^31-1, a compressed id, required
  int64_t reset_id = -1;               // -1..2^31-1
  std::optional<Blocking> blocking{};  // required
  Tensor window{};                     // out: I32[T, Nmax], apart from the inputs
};

// Throws Error{contract} for borders that are none (CPU only: a device's are not read).
EHC_API void window(Context& context, const Window& params);
// Bytes of workspace for this call; see Context::set_workspace.
EHC_API size_t workspace_bytes(const Context& context, const Window& params);

}  // namespace ehc::engram
