// One index of a table row and where it stands.
#pragma once

#include <cstdint>

namespace ehc::engram {

// Word: uint32_t where rows and positions fit, else uint64_t.
template <class Word>
struct alignas(2 * sizeof(Word)) RowEntry {
  Word row;
  Word at;  // t*C + c
};

}  // namespace ehc::engram
