// mhc.prenorm_gemm on SIMD lanes.
//
//   mul[s,t,g,j] = sum of x[t,k] fn[j,k], sqr[s,t,g] = sum of x[t,k]^2, over columns k in (s, g)
//   x A[T,n,d] as [T,K], fn F32[M,K]; mul F32[S,T,G,M], sqr F32[S,T,G]
//
// Bytes: x once, fn once for up to 256 tokens (from a cache), 4*S*G*(M+1) written a token.
// Algorithm: lanes are columns of a chunk of 512. fn of a chunk is put in the lane order of A (and
// rounded to TF32 where asked for) for up to 256 tokens; a tile of kWide mixes and two tokens stays
// in registers for the chunk, its lanes are then added. Sums of chunks meet in a pairwise tree of
// which a split is a node.
// Class B: a sum depends on its token's columns alone. Lanes go by the place in the chunk.
#include <type_traits>

#include "backends/cpu/simd_tile.h"
#include "ops/mhc/prenorm_gemm/prenorm_gemm_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

using simd::kLanes;
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

// A chunk of all tokens of a call.
template <class A>
class VectorProduct {
 public:
  static constexpr int64_t kStep = 1;

  VectorProduct(const PrenormGemmArgs& a, int64_t first_token, int64_t tokens, const Scratch& s)
      : a_(a), streams_(a, first_token), tokens_(tokens), scratch_(s) {}

  // fn in the lane order of A, filled up with zeros; rows in one piece.
  void begin_chunk(const Columns& columns) {
    const int64_t width = columns.end - columns.begin;
    for (int64_t j = 0; j < a_.mixes; ++j) {
      float room[kChunkColumns];
      const float* row = fn_row(a_, j, columns.begin, width, room);
      float* to = scratch_.fn + j * kChunkColumns;
      for (int64_t k = 0; k < width; k += kPair) {
        simd::store(to + k, simd::load_f32_some<A>(row + k, width - k));
      }
    }
    if (streams_.side_by_side()) {
      chunk_ = {streams_.at(0, columns.begin), streams_.token_stride(), tokens_, width, nullptr};
      return;
    }
    A* rows = reinterpret_cast<A*>(scratch_.rows);
    for (int64_t t = 0; t < tokens_; ++t) streams_.copy(t, columns, rows + t * kChunkColumns);
    chunk_ = {rows, kChunkColumns, tokens_, width, nullptr};
  }
  void multiply(int64_t first, float* sums) const {
    multiply_group(group_of(chunk_, first),
                   {scratch_.fn, scratch_.widened, sums, a_.mixes, pitch()});
  }
  [[nodiscard]] int64_t place(int64_t token) const { return token * pitch(); }
  [[nodiscard]] int64_t floats(int64_t tokens) const { return tokens * pitch(); }

 private:
  [[nodiscard]] int64_t pitch() const { return scratch_.layout.pitch; }

  const PrenormGemmArgs& a_;
  StreamColumns<A> streams_;
  int64_t tokens_;
  const Scratch& scratch_;
  ChunkRows<A> chunk_{};
};

}  // namespace

void prenorm_gemm_block(const PrenormGemmArgs& a, int64_t split, int64_t begin, int64_t end,
                        float* scratch) {
  simd::with_activation(a.sizes.activation, [&](auto activation) {
    const Scratch arrays(a, end - begin, scratch);
    VectorProduct<decltype(activation)> product(a, begin, end - begin, arrays);
    for (int64_t g = 0; g < a.groups; ++g) {
      project_columns(a, product, arrays, split, g, begin, end);
    }
  });
}

}  // namespace ehc::mhc::EHC_ISA
