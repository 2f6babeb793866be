// From the tensors of a call to the arguments of its kernels, and the split over threads.
#pragma once

#include <algorithm>

#include "backends/cpu/cache.h"
#include "core/bind.h"
#include "core/parallel.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

inline StreamRows stream_rows(const Tensor& t) {
  return {t.data, t.stride[0], t.rank == 3 ? t.stride[1] : 0};
}

inline Coefficients coefficients(const Tensor& t) {
  return {t.as<float>(), t.stride[0], t.rank == 3 ? t.stride[1] : 0};
}

inline MixRows mix_rows(const Tensor& t) { return {t.as<float>(), t.stride[0]}; }

inline StreamSizes stream_sizes(const Bound& bound) {
  return {bound["T"], bound["n"], bound["d"], bound.activation};
}

// Does a call that moves `rows` rows a token touch more than the last-level cache holds? Then
// outputs that nobody reads back go past the caches.
inline bool exceeds_cache(const StreamSizes& sizes, int64_t rows) {
  const auto row_bytes = static_cast<size_t>(sizes.hidden) * size_of(sizes.activation);
  return static_cast<size_t>(sizes.tokens * rows) * row_bytes > last_level_cache_bytes();
}

// Tokens of which a thread takes at least so many at a time.
inline int64_t tokens_of_grain(const StreamSizes& sizes) {
  return std::max<int64_t>(1, 16384 / (sizes.streams * sizes.hidden));
}

// Calls body(tile) for tiles that cover the call, for operators without sums over d. Few tokens are
// cut by columns too, at multiples of kColumns, so that every thread has work.
template <class Body>
void for_each_tile(Context& context, const StreamSizes& sizes, const Body& body) {
  constexpr int64_t kColumns = 512;
  if (sizes.tokens == 0) return;
  const int64_t wanted = 4 * context.executor().concurrency();
  const int64_t longest = (sizes.hidden + kColumns - 1) / kColumns;
  const int64_t blocks = std::clamp<int64_t>(wanted / sizes.tokens, 1, longest);
  if (blocks == 1) {
    parallel_for(context, sizes.tokens, tokens_of_grain(sizes), [&](int64_t begin, int64_t end) {
      body(Tile{begin, end, 0, sizes.hidden});
    });
    return;
  }
  const int64_t columns = (longest + blocks - 1) / blocks * kColumns;
  const int64_t grain = std::max<int64_t>(1, 16384 / (sizes.streams * columns));
  parallel_for(context, sizes.tokens * blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      const int64_t token = u / blocks;
      const int64_t column = u % blocks * columns;
      const int64_t column_end = std::min(sizes.hidden, column + columns);
      if (column < column_end) body(Tile{token, token + 1, column, column_end});
    }
  });
}

}  // namespace ehc::mhc
