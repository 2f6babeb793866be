// How sums over tokens are cut: into chunks that T alone decides, each summed in token order, their
// partial sums added in ascending order. So no bit depends on threads, processors or devices.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ehc {

// At least 8, and so many that there are at most 128 chunks.
inline int64_t tokens_of_chunk(int64_t tokens) {
  return std::max<int64_t>(8, tokens / 128 + (tokens % 128 != 0 ? 1 : 0));
}

inline int64_t chunks_of_tokens(int64_t tokens) {
  const int64_t size = tokens_of_chunk(tokens);
  return tokens / size + (tokens % size != 0 ? 1 : 0);
}

}  // namespace ehc
