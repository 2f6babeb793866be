// mhc.prenorm_gemm on SIMD lanes.
//
//   mul[s,t,g,j] = sum of x[t,k] fn[j,k], sqr[s,t,g] = sum of x[t,k]^2, over columns k in (s, g)
//   x A[T,n,d] as [T,K], fn F32[M,K]; mul F32[S,T,G,M], sqr F32[S,T,G]
//
// Bytes: x once, fn once for up to 256 tokens (from a cache), 4*S*G*(M+1) written a token.
// Algorithm: lanes are four columns of as many mixes as a vector has room for (simd_tile.h). fn of
// a chunk of 512 columns is packed that way (and rounded to TF32 where asked for) for up to 256
// tokens. Of a strip of the chunk, the streams of kTall tokens are widened and their squares
// summed; then a tile of kWide vectors of mixes and these tokens goes over the strip in registers.
// fn of a strip stays in the first-level cache for 32 tokens, and each tile fetches the rows of the
// next. Sums of lanes are added at the end of a chunk; sums of chunks meet in a pairwise tree of
// which a split is a node. Class B: a sum depends on its token's columns alone. Lanes go by the
// place in the chunk.
#include <type_traits>

#include "backends/cpu/simd_tile.h"
#include "ops/mhc/prenorm_gemm/prenorm_gemm_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

using simd::kFours;
using simd::kLanes;
using simd::Pair;
using simd::Vec;

// A tile: vectors of mixes, fewer for what is left, and tokens.
inline constexpr bool kHasRegisters = simd::kPairsTogether > 1;
inline constexpr int kWide = kHasRegisters ? 6 : 2, kMiddle = 2;
inline constexpr int kTall = kLanes == 16 ? 4 : kHasRegisters ? 2 : 1;

// Columns of a strip.
inline constexpr int64_t kStrip = 256;
static_assert(kChunkColumns % kStrip == 0 && kStrip % kPair == 0);
static_assert(kTall * kStrip + kPrenormGroup * (kPair + 4 * (kPrenormMixes + kFours)) <=
              kPrenormGroup * kChunkColumns);  // `widened` of the scratch
// Floats of a vector of mixes over a chunk.
inline constexpr int64_t kVectorFloats = kFours * kChunkColumns;

// A chunk of the streams of a group of tokens: rows of A.
template <class A>
struct ChunkRows {
  const A* first;
  int64_t stride, tokens, width;
  int64_t ahead;  // to the rows that are wanted after these

  // What is wanted when `token` is at hand, which may be beyond the last, in the strip at `begin`.
  EHC_SIMD const A* after(int64_t token, int64_t begin) const {
    if (token < tokens) return first + token * stride + begin;
    const A* row = first + (token - tokens) % tokens * stride;
    return begin + kStrip < width ? row + begin + kStrip : row + ahead;
  }
};

// What a strip of a group of tokens is multiplied with, and what comes of it.
struct Product {
  const float* fn;  // [vectors, kChunkColumns / 4, lanes], those of a tile side by side
  float* widened;   // [kTall, kStrip]: x in the lane order of A
  float* products;  // [vectors, kPrenormGroup, lanes]: sums
  float* squares;   // [kPrenormGroup, kPair]: sums
  int64_t vectors;
};

// Rows that are fetched while a tile is multiplied, `bytes` of each for a pair of columns.
struct RowsAhead {
  const char* first;
  int64_t stride, bytes;

  EHC_SIMD void fetch(int64_t token, int64_t pair) const {
    const char* at = first + token * stride + pair * bytes;
    simd::prefetch_near(at);
    simd::prefetch_near(at + bytes / 2);  // of F32 the second line
  }
};

// Calls body with the number of vectors and the first of each tile of mixes.
template <class Body>
EHC_SIMD void each_tile(int64_t vectors, const Body& body) {
  int64_t v = 0;
  for (; v + kWide <= vectors; v += kWide) body(std::integral_constant<int, kWide>{}, v);
  for (; v + kMiddle <= vectors; v += kMiddle) body(std::integral_constant<int, kMiddle>{}, v);
  for (; v < vectors; ++v) body(std::integral_constant<int, 1>{}, v);
}

// kVectors vectors of mixes times four columns of kTokens tokens.
template <int kVectors, int kTokens>
EHC_SIMD void multiply_four(const float* fn, const float* x, Vec (&sums)[kVectors][kTokens]) {
  Vec columns[kTokens];
#pragma GCC unroll 4
  for (int t = 0; t < kTokens; ++t) columns[t] = simd::broadcast_four(x + t * kStrip);
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const Vec factor = simd::load_vec(fn + v * kLanes);
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) simd::add_product(sums[v][t], columns[t], factor);
  }
}

// kVectors vectors of mixes times kTokens tokens over pairs of columns. A function of its own, lest
// the compiler keep sums in memory.
template <int kVectors, int kTokens>
[[gnu::noinline]] void multiply_tile(const float* fn, const float* x, int64_t pairs, bool begins,
                                     const RowsAhead& ahead, float* products) {
  Vec sums[kVectors][kTokens];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
      sums[v][t] =
          begins ? simd::zero() : simd::load_vec(products + (v * kPrenormGroup + t) * kLanes);
    }
  }
  for (int64_t pair = 0; pair < pairs; ++pair) {
    for (int t = 0; t < kTokens; ++t) ahead.fetch(t, pair);
#pragma GCC unroll 2
    for (int four = 0; four < kPair / 4; ++four, x += 4, fn += kVectors * kLanes) {
      multiply_four<kVectors, kTokens>(fn, x, sums);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
      simd::store_vec(products + (v * kPrenormGroup + t) * kLanes, sums[v][t]);
    }
  }
}

// Columns of a strip of kTokens rows become fp32, filled up with zeros to a pair; their squares are
// added.
template <class A, int kTokens>
EHC_SIMD void widen_rows(const A* rows, int64_t stride, int64_t width, bool begins, float* widened,
                         float* squares) {
  Pair sums[kTokens];
  for (int t = 0; t < kTokens; ++t) {
    sums[t] = begins ? simd::zero_pair() : simd::load(squares + t * kPair);
  }
  const auto widen = [&](int64_t column, int64_t count) EHC_SIMD_LAMBDA {
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
      const Pair x = simd::load_some(rows + t * stride + column, count);
      simd::store(widened + t * kStrip + column, x);
      sums[t] = simd::fma(x, x, sums[t]);
    }
  };
  int64_t column = 0;
  for (; column + kPair <= width; column += kPair) widen(column, kPair);
  if (column < width) widen(column, width - column);
  for (int t = 0; t < kTokens; ++t) simd::store(squares + t * kPair, sums[t]);
}

// kTokens tokens from `token` on times all mixes over columns [begin, begin + width) of a chunk, at
// most a strip.
template <class A, int kTokens>
EHC_SIMD void multiply_rows(const ChunkRows<A>& chunk, int64_t token, int64_t begin, int64_t width,
                            const Product& p) {
  constexpr int64_t kBytes = sizeof(A);
  const int64_t at = token * chunk.stride + begin, pairs = (width + kPair - 1) / kPair;
  widen_rows<A, kTokens>(chunk.first + at, chunk.stride, width, begin == 0, p.widened,
                         p.squares + token * kPair);
  const RowsAhead ahead = {reinterpret_cast<const char*>(chunk.after(token + kTokens, begin)),
                           chunk.stride * kBytes, kPair * kBytes};
  each_tile(p.vectors, [&](auto vectors, int64_t v) EHC_SIMD_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value;
    multiply_tile<kVectors, kTokens>(p.fn + v * kVectorFloats + begin / 4 * kVectors * kLanes,
                                     p.widened, pairs, begin == 0, ahead,
                                     p.products + (v * kPrenormGroup + token) * kLanes);
  });
}

// Tokens of a group times all mixes over a chunk.
template <class A>
inline void multiply_group(const ChunkRows<A>& chunk, const Product& p, FnAhead& fn) {
  for (int64_t begin = 0; begin < chunk.width; begin += kStrip) {
    const int64_t rest = chunk.width - begin, width = rest < kStrip ? rest : kStrip;
    int64_t t = 0;
    for (; t + kTall <= chunk.tokens; t += kTall) {
      multiply_rows<A, kTall>(chunk, t, begin, width, p);
      if (begin == 0) fn.fetch(kTall);
    }
    for (; t < chunk.tokens; ++t) {
      multiply_rows<A, 1>(chunk, t, begin, width, p);
      if (begin == 0) fn.fetch(1);
    }
  }
}

// Sums over lanes of what a group of tokens has: the mixes of a token, and its squares behind them.
inline void add_lanes(const Product& p, int64_t tokens, int64_t mixes, float* sums, int64_t pitch) {
  for (int64_t t = 0; t < tokens; ++t, sums += pitch) {
    for (int64_t v = 0; v < p.vectors; v += 4) {
      const auto vector = [&](int64_t i) EHC_SIMD_LAMBDA {
        const float* at = p.products + ((v + i) * kPrenormGroup + t) * kLanes;
        return v + i < p.vectors ? simd::load_vec(at) : simd::zero();
      };
      const Vec four = simd::add_fours(vector(0), vector(1), vector(2), vector(3));
      simd::store_some(sums + v * kFours, Pair{four, simd::zero()},
                       mixes - v * kFours < kLanes ? mixes - v * kFours : kLanes, false);
    }
    sums[mixes] = simd::reduce_add(simd::load(p.squares + t * kPair));
  }
}

// kFours mixes over a chunk become vectors, `step` floats apart; mixes without a row and columns up
// to a pair are zeros.
template <class A>
EHC_SIMD void pack_mixes(const float* const* rows, int64_t width, float* to, int64_t step) {
  for (int64_t k = 0; k < width; k += kPair, to += kPair / 4 * step) {
    Vec low[kFours], high[kFours];
    for (int m = 0; m < kFours; ++m) {
      const Pair x = rows[m] ? simd::load_some(rows[m] + k, width - k) : simd::zero_pair();
      low[m] = x.a;
      high[m] = x.b;
    }
    simd::transpose_fours(low);
    simd::transpose_fours(high);
    for (int q = 0; q < kFours; ++q) {
      simd::store_vec(to + simd::place_of_four<A>(q) * step, low[q]);
      simd::store_vec(to + simd::place_of_four<A>(kFours + q) * step, high[q]);
    }
  }
}

// A chunk of all tokens of a call.
template <class A>
class VectorProduct {
 public:
  static constexpr int64_t kStep = 1;

  VectorProduct(const PrenormGemmArgs& a, int64_t first_token, int64_t tokens, const Scratch& s)
      : a_(a), streams_(a, first_token), tokens_(tokens), scratch_(s) {
    product_.widened = s.widened;
    product_.squares = product_.widened + kTall * kStrip;
    product_.products = product_.squares + kPrenormGroup * kPair;
    product_.vectors = (a.mixes + kFours - 1) / kFours;
  }

  // fn is packed.
  void prepare(const Chunk& chunk) const {
    const Columns columns = chunk.columns;
    const int64_t width = columns.end - columns.begin;
    each_tile(product_.vectors, [&](auto vectors, int64_t first) {
      for (int64_t v = first; v < first + vectors; ++v) {
        float room[kFours][kChunkColumns];
        const float* rows[kFours] = {};
        for (int64_t m = 0; m < kFours && v * kFours + m < a_.mixes; ++m) {
          rows[m] = fn_row(a_, v * kFours + m, columns.begin, width, room[m]);
        }
        pack_mixes<A>(rows, width, packed(chunk) + first * kVectorFloats + (v - first) * kLanes,
                      vectors * kLanes);
      }
    });
  }
  void multiply(int64_t first, const Chunk& chunk, const Ahead& ahead, float* sums) {
    const int64_t left = tokens_ - first, tokens = left < kPrenormGroup ? left : kPrenormGroup;
    const Columns columns = chunk.columns;
    ChunkRows<A> rows = {streams_.at(first, columns.begin), streams_.token_stride(), tokens,
                         columns.end - columns.begin, ahead.elements};
    if (!streams_.side_by_side()) {
      A* room = reinterpret_cast<A*>(scratch_.rows);
      for (int64_t t = 0; t < tokens; ++t) {
        streams_.copy(first + t, columns, room + t * kChunkColumns);
      }
      rows.first = room, rows.stride = kChunkColumns, rows.ahead = 0;
    }
    product_.fn = packed(chunk);
    multiply_group(rows, product_, *ahead.fn);
    add_lanes(product_, tokens, a_.mixes, sums, pitch());
  }
  [[nodiscard]] int64_t place(int64_t token) const { return token * pitch(); }
  [[nodiscard]] int64_t floats(int64_t tokens) const { return tokens * pitch(); }

 private:
  [[nodiscard]] int64_t pitch() const { return scratch_.layout.pitch; }
  [[nodiscard]] float* packed(const Chunk& chunk) const {
    return scratch_.fn + chunk.place * product_.vectors * kVectorFloats;
  }

  const PrenormGemmArgs& a_;
  StreamColumns<A> streams_;
  int64_t tokens_;
  const Scratch& scratch_;
  Product product_{};
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
