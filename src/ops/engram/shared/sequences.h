// cu_seqlens I32[B+1]: borders of the sequences that a batch of T tokens is cut into.
#pragma once

#include <string>

#include "core/bind.h"

namespace ehc::engram {

// The borders start at 0, do not decrease and end at `tokens`; checked where the host can read
// them. Throws Error{contract} naming the element.
inline void check_sequences(const Schema& schema, const Tensor& cu_seqlens, int64_t tokens) {
  if (!cu_seqlens.present() || cu_seqlens.device != Device::cpu) return;
  const auto* border = cu_seqlens.as<const int32_t>();
  const int64_t last = cu_seqlens.shape[0] - 1;
  const auto refuse = [&](const std::string& expected, int64_t at) {
    fail_tensor(schema, "cu_seqlens", expected,
                std::to_string(border[at]) + " at position " + std::to_string(at));
  };
  if (border[0] != 0) refuse("a first element 0", 0);
  for (int64_t b = 1; b <= last; ++b) {
    if (border[b] < border[b - 1]) refuse("elements that do not decrease", b);
  }
  if (border[last] != tokens) refuse("a last element T = " + std::to_string(tokens), last);
}

}  // namespace ehc::engram
