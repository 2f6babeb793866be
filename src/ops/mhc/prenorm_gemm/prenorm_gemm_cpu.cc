// mhc.prenorm_gemm on SIMD lanes.
//
//   mul[s,t,g,j] = sum of x[t,k] fn[j,k], sqr[s,t,g] = sum of x[t,k]^2, over columns k in (s, g)
//   x A[T,n,d] as [T,K], fn F32[M,K]; mul F32[S,T,G,M], sqr F32[S,T,G]
//
// Bytes: x once, fn once for 64 tokens (from a cache), 4*S*G*(M+1) written a token.
// Algorithm: lanes are columns of a chunk of 512. fn of a chunk is put in the lane order of A (and
// rounded to TF32 where asked for) for 64 tokens; a tile of kWide mixes and two tokens stays in
// registers for the chunk, its lanes are then added. Sums of chunks meet in a pairwise tree of
// which a split is a node.
// Class B: a sum depends on its token's columns alone. Lanes go by the place in the chunk.
#include <cstring>
#include <type_traits>

#include "backends/cpu/simd_tile.h"
#include "core/float_formats.h"
#include "ops/mhc/prenorm_gemm/prenorm_gemm_args.h"
#include "ops/mhc/shared/stream_rows_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

using simd::kLanes;
using simd::kPair;
using simd::Pair;
using simd::Vec;
static_assert(kChunkColumns % kPair == 0);

// Mixes of a tile: as many as registers hold for two tokens, and fewer for what is left.
inline constexpr int kWide = kLanes == 16 ? 12 : simd::kPairsTogether > 1 ? 5 : 2;
inline constexpr int kMiddle = kLanes == 16 ? 4 : 2;

// Tokens that share what the first-level cache has of fn, and of which the widened columns stay in
// the second. Few, because rows of different tokens may compete for the same places of a cache.
inline constexpr int64_t kGroup = kPrenormGroup;

// A chunk of the streams of tokens: rows of A. The rows from `soon` on are wanted next.
template <class A>
struct ChunkRows {
  const A* first;
  int64_t stride, tokens, width;
  const A* soon;

  EHC_SIMD const A* operator[](int64_t token) const { return first + token * stride; }
};

// What a group of tokens is multiplied with and where the sums go: token t, mix j at t * pitch + j,
// the squares behind the mixes.
struct Product {
  const float* fn;  // [M, kChunkColumns], in the lane order of A, filled up with zeros
  float* widened;   // [kGroup, kChunkColumns]: x in that order, made by the first tile of a token
  float* sums;
  int64_t mixes, pitch;
};

template <int kMixes, int kTokens>
struct TileSums {
  Vec product[kTokens][kMixes];
  Vec square[kTokens];
};

// Products of one vector of each token. A factor serves all tokens: once loaded it stays in a
// register, where compilers would load it again for each.
template <int kMixes, int kTokens, bool kFirst>
EHC_SIMD void add_products(const Vec* x, const float* fn, TileSums<kMixes, kTokens>& sums) {
#pragma GCC unroll 16
  for (int j = 0; j < kMixes; ++j) {
    Vec factor = simd::load(fn + j * kChunkColumns).a;
    if constexpr (kTokens > 1) simd::keep(factor);
#pragma GCC unroll 2
    for (int t = 0; t < kTokens; ++t) {
      sums.product[t][j] = simd::fma(x[t], factor, sums.product[t][j]);
    }
  }
  if constexpr (kFirst) {
    for (int t = 0; t < kTokens; ++t) sums.square[t] = simd::fma(x[t], x[t], sums.square[t]);
  }
}

// The same of a pair of vectors, of which `count` columns exist.
template <class A, int kMixes, int kTokens, bool kFirst>
EHC_SIMD void add_column_products(const A* const* rows, float* widened, const float* fn,
                                  int64_t column, int64_t count, TileSums<kMixes, kTokens>& sums) {
  Vec low[kTokens], high[kTokens];
#pragma GCC unroll 2
  for (int t = 0; t < kTokens; ++t) {
    float* at = widened + t * kChunkColumns + column;
    const Pair x = kFirst ? simd::load_some(rows[t] + column, count) : simd::load(at);
    if constexpr (kFirst) simd::store(at, x);
    low[t] = x.a;
    high[t] = x.b;
  }
  add_products<kMixes, kTokens, kFirst>(low, fn + column, sums);
  add_products<kMixes, kTokens, kFirst>(high, fn + column + kLanes, sums);
}

// The part of a row that the tile of mix j fetches: spread over all tiles it does not hold them up.
template <class A>
EHC_SIMD void fetch_part(const A* row, int64_t width, int64_t j, int64_t mixes) {
  constexpr int64_t kLine = 64 / sizeof(A);
  const int64_t parts = (mixes + kWide - 1) / kWide, part = j / kWide;
  const int64_t end = width * (part + 1) / parts;
  for (int64_t at = width * part / parts; at < end; at += kLine) simd::prefetch(row + at);
}

// kMixes mixes, from j on, of kTokens tokens over the width of a chunk.
template <class A, int kMixes, int kTokens, bool kFirst>
EHC_SIMD void multiply_tile(const ChunkRows<A>& chunk, const Product& p, int64_t token, int64_t j) {
  const A* rows[kTokens];
  TileSums<kMixes, kTokens> tile;
  const float* fn = p.fn + j * kChunkColumns;
  float* widened = p.widened + token * kChunkColumns;
#pragma GCC unroll 2
  for (int t = 0; t < kTokens; ++t) {
    rows[t] = chunk[token + t];
    fetch_part(chunk.soon + (token + t) * chunk.stride, chunk.width, j, p.mixes);
    tile.square[t] = simd::zero();
#pragma GCC unroll 16
    for (int m = 0; m < kMixes; ++m) tile.product[t][m] = simd::zero();
  }
  int64_t column = 0;
  for (; column + kPair <= chunk.width; column += kPair) {
    add_column_products<A, kMixes, kTokens, kFirst>(rows, widened, fn, column, kPair, tile);
  }
  if (column < chunk.width) {
    add_column_products<A, kMixes, kTokens, kFirst>(rows, widened, fn, column, chunk.width - column,
                                                    tile);
  }
#pragma GCC unroll 2
  for (int t = 0; t < kTokens; ++t) {
    float* to = p.sums + (token + t) * p.pitch;
    const Pair sums = {simd::reduce_add_each<kMixes>(tile.product[t]), simd::zero()};
    simd::store_some(to + j, sums, kMixes, false);
    if constexpr (kFirst) to[p.mixes] = simd::reduce_add(tile.square[t]);
  }
}

// kMixes mixes, from j on, of all tokens of a group.
template <class A, int kMixes, bool kFirst>
inline void multiply_rows(const ChunkRows<A>& chunk, const Product& p, int64_t j) {
  int64_t t = 0;
  for (; t + 2 <= chunk.tokens; t += 2) multiply_tile<A, kMixes, 2, kFirst>(chunk, p, t, j);
  if (t < chunk.tokens) multiply_tile<A, kMixes, 1, kFirst>(chunk, p, t, j);
}

template <class A>
inline void multiply_group(const ChunkRows<A>& chunk, const Product& p) {
  const auto rows = [&](auto size, int64_t j) EHC_SIMD_LAMBDA {
    if (j == 0) {
      multiply_rows<A, decltype(size)::value, true>(chunk, p, j);
    } else {
      multiply_rows<A, decltype(size)::value, false>(chunk, p, j);
    }
  };
  int64_t j = 0;
  for (; j + kWide <= p.mixes; j += kWide) rows(std::integral_constant<int, kWide>{}, j);
  for (; j + kMiddle <= p.mixes; j += kMiddle) rows(std::integral_constant<int, kMiddle>{}, j);
  for (; j < p.mixes; ++j) rows(std::integral_constant<int, 1>{}, j);
}

// Tokens from `first` on, at most a group of them.
template <class A>
EHC_SIMD ChunkRows<A> group_of(const ChunkRows<A>& chunk, int64_t first) {
  const int64_t left = chunk.tokens - first;
  return {chunk[first], chunk.stride, left < kGroup ? left : kGroup, chunk.width,
          left > kGroup ? chunk[first + kGroup] : chunk.first + chunk.width};
}

// fn of columns [begin, begin + width) in the lane order of A, filled up with zeros. Fetches the
// columns behind them, which come next.
template <class A>
inline void pack_fn(const PrenormGemmArgs& a, int64_t begin, int64_t width, float* to) {
  for (int64_t j = 0; j < a.mixes; ++j, to += kChunkColumns) {
    const float* row = a.fn.data + j * a.fn.stride + begin;
    constexpr int64_t kLine = 64 / sizeof(float);
    for (int64_t k = 0; k < width; k += kLine) simd::prefetch(row + width + k);
    float rounded[kChunkColumns];
    if (a.tf32) {
      for (int64_t k = 0; k < width; ++k) rounded[k] = round_to_tf32(row[k]);
      row = rounded;
    }
    for (int64_t k = 0; k < width; k += kPair) {
      simd::store(to + k, simd::load_f32_some<A>(row + k, width - k));
    }
  }
}

// The columns of tokens, in place where a token's streams lie side by side, else copied to `room`.
template <class A>
inline ChunkRows<A> chunk_rows(const PrenormGemmArgs& a, int64_t first, int64_t tokens,
                               const Columns& columns, float* room) {
  const A* from = static_cast<const A*>(a.residual.data) + first * a.residual.token_stride;
  const int64_t d = a.sizes.hidden, width = columns.end - columns.begin;
  if (a.residual.stream_stride == d || a.sizes.streams == 1) {
    return {from + columns.begin, a.residual.token_stride, tokens, width, nullptr};
  }
  A* to = reinterpret_cast<A*>(room);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t k = columns.begin; k < columns.end;) {
      const int64_t stream = k / d, border = (stream + 1) * d;
      const int64_t end = border < columns.end ? border : columns.end;
      std::memcpy(
          to + t * kChunkColumns + k - columns.begin,
          from + t * a.residual.token_stride + stream * a.residual.stream_stride + k - stream * d,
          static_cast<size_t>(end - k) * sizeof(A));
      k = end;
    }
  }
  return {to, kChunkColumns, tokens, width, nullptr};
}

EHC_SIMD void add_to(float* sums, const float* more, int64_t count) {
  for (int64_t i = 0; i < count; i += kPair) {
    simd::store_some(
        sums + i, add(simd::load_some(more + i, count - i), simd::load_some(sums + i, count - i)),
        count - i, false);
  }
}

// Sums of chunks in the order of pairwise_sum, each `count` floats. Chunks that are left out count
// as zeros.
class SumTree {
 public:
  SumTree() = default;
  SumTree(float* levels, int64_t count) : levels_(levels), count_(count) {}

  // The sums of chunk `index`, which ascends; they are used up.
  void push(int64_t index, float* sums) {
    int level = 0;
    for (; (index >> level & 1) != 0; ++level) {
      if ((filled_ >> level & 1) != 0) add_to(sums, at(level), count_);
      filled_ &= ~(uint64_t{1} << level);
    }
    std::memcpy(at(level), sums, static_cast<size_t>(count_) * sizeof(float));
    filled_ |= uint64_t{1} << level;
  }
  // The sum of all; null when there was none.
  float* finish() {
    float* sum = nullptr;
    for (int level = 0; filled_ >> level != 0; ++level) {
      if ((filled_ >> level & 1) == 0) continue;
      if (sum) add_to(at(level), sum, count_);
      sum = at(level);
    }
    return sum;
  }

 private:
  float* at(int level) { return levels_ + level * count_; }
  float* levels_ = nullptr;
  int64_t count_ = 0;
  uint64_t filled_ = 0;
};

// `sums` null: zeros.
inline void write_sums(const PrenormGemmArgs& a, int64_t split, int64_t group, int64_t begin,
                       int64_t end, const float* sums, int64_t pitch) {
  for (int64_t t = begin; t < end; ++t) {
    float* mul = a.mul_partial.data + split * a.mul_partial.split_stride +
                 t * a.mul_partial.token_stride + group * a.mul_partial.group_stride;
    float* sqr = a.sqr_partial.data + split * a.sqr_partial.split_stride +
                 t * a.sqr_partial.token_stride + group * a.sqr_partial.group_stride;
    const float* row = sums ? sums + (t - begin) * pitch : nullptr;
    for (int64_t j = 0; j < a.mixes; ++j) mul[j] = row ? row[j] : 0.0f;
    *sqr = row ? row[a.mixes] : 0.0f;
  }
}

// The columns of one RMS group that a split has, chunk by chunk; chunks count from the start of the
// split.
template <class A>
inline void project_columns(const PrenormGemmArgs& a, int64_t split, int64_t rms_group,
                            const Columns& of_split, int64_t begin, int64_t end, float* scratch) {
  const PrenormScratch layout = prenorm_scratch(a, end - begin);
  float* fn = scratch;
  float* room = fn + layout.fn;
  float* widened = room + layout.rows;
  float* sums = widened + layout.widened;
  const Product product = {fn, widened, sums, a.mixes, layout.pitch};
  const int64_t tokens = end - begin;
  SumTree trees[kPrenormTokens / kGroup];
  for (int64_t t = 0; t < tokens; t += kGroup) {
    trees[t / kGroup] = {sums + layout.sums * (1 + t / kGroup * layout.levels), layout.sums};
  }
  const int64_t width = a.sizes.streams * a.sizes.hidden / a.groups;
  const int64_t first = rms_group * width, last = first + width;
  int64_t k = of_split.begin > first ? of_split.begin : first;
  const int64_t stop = of_split.end < last ? of_split.end : last;
  while (k < stop) {
    const int64_t index = (k - of_split.begin) / kChunkColumns;
    const int64_t border = of_split.begin + (index + 1) * kChunkColumns;
    const Columns columns = {k, border < stop ? border : stop};
    pack_fn<A>(a, columns.begin, columns.end - columns.begin, fn);
    const ChunkRows<A> chunk = chunk_rows<A>(a, begin, tokens, columns, room);
    for (int64_t t = 0; t < tokens; t += kGroup) {
      multiply_group(group_of(chunk, t), product);
      trees[t / kGroup].push(index, sums);
    }
    k = columns.end;
  }
  for (int64_t t = 0; t < tokens; t += kGroup) {
    const int64_t group_end = t + kGroup < tokens ? t + kGroup : tokens;
    write_sums(a, split, rms_group, begin + t, begin + group_end, trees[t / kGroup].finish(),
               layout.pitch);
  }
}

}  // namespace

void prenorm_gemm_block(const PrenormGemmArgs& a, int64_t split, int64_t begin, int64_t end,
                        float* scratch) {
  simd::with_activation(a.sizes.activation, [&](auto activation) {
    const Columns columns = columns_of_split(a, split);
    for (int64_t g = 0; g < a.groups; ++g) {
      project_columns<decltype(activation)>(a, split, g, columns, begin, end, scratch);
    }
  });
}

}  // namespace ehc::mhc::EHC_ISA
