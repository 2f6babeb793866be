// mhc.prenorm_gemm on AMX tiles, for BF16 activations.
//
//   mul[s,t,g,j] = sum of x[t,k] fn[j,k], sqr[s,t,g] = sum of x[t,k]^2, over columns k in (s, g)
//   x BF16[T,n,d] as [T,K], fn F32[M,K]; mul F32[S,T,G,M], sqr F32[S,T,G]
//
// Bytes: x once, fn once for 256 tokens (from a cache), 4*S*G*(M+1) written a token.
// Algorithm: fn is the sum of three bf16 numbers of eight bits each, exactly: the upper half of it,
// of what that leaves, and the rest. So parts of fn times tokens are bf16 products with fp32 sums,
// of a chunk of 512 columns at a time. The second part is multiplied by 2^7 and the third by 2^15,
// lest they be subnormal; with that taken back the three sums of a mix are added. Columns of 16
// tokens are turned so that they can be a right factor; squares are summed on vectors. What is at
// hand at a time, 256 columns of 32 tokens and of eight mixes, stays in the first-level cache.
// Accuracy: the sums are rounded to nearest like any fp32 sum (simd_amx.h). Of normal data the
// error against double is at most 1.4e-7 of the largest output for K = 512, 4096 and 28672. But fn
// below 2^-118 loses its last bits, and below 2^-126 all; subnormal x, products and squares are
// zero.
//
// An infinity in x or fn makes parts of a sum NaN: then the sum of the first parts is the answer.
//
// Class B: a sum depends on its token's columns alone.
#include "backends/cpu/simd_amx.h"
#include "ops/mhc/prenorm_gemm/prenorm_gemm_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

using simd::Bf16;
using simd::kTileDepth;
using simd::kTileFloats;
using simd::kTileRows;
using simd::Pair;
using simd::Vec;

// Mixes that go together: their first and second parts are a tile, the third ones half a tile.
inline constexpr int64_t kMixes = kPartMixes;
inline constexpr int kParts = 3;
inline constexpr int64_t kPartTiles = kParts * kMixes * kTileRows;   // floats of a step's parts
inline constexpr float kSecondScale = 0x1p7f, kThirdScale = 0x1p8f;  // the third has both
static_assert(kPrenormGroup == 2 * kTileRows && kTileDepth == kPair && 2 * kMixes == kTileRows);

// Tiles: sums of whole and half tiles of parts with two tiles of tokens, those, and the parts.
enum Register { kWhole0, kWhole1, kHalf0, kHalf1, kTokens0, kTokens1, kWholeParts, kHalfParts };
inline constexpr simd::TileShapes kShapes = {.rows = {16, 16, 8, 8, 16, 16, 16, 8}};

// Parts of columns 0, 2, ... and 1, 3, ... as pairs of bf16.
struct PartPairs {
  Vec part[kParts];
};

EHC_SIMD PartPairs parts_of(Pair x) {
  PartPairs parts;
  for (int i = 0; i < kParts - 1; ++i) {
    const Pair upper = {simd::upper_halves(x.a), simd::upper_halves(x.b)};
    parts.part[i] = simd::pairs_of(upper.a, upper.b);
    const Vec scale = simd::splat(i == 0 ? kSecondScale : kThirdScale);
    x = {simd::mul(simd::sub(x.a, upper.a), scale), simd::mul(simd::sub(x.b, upper.b), scale)};
  }
  parts.part[kParts - 1] = simd::pairs_of(x.a, x.b);  // eight bits are left
  return parts;
}

// Steps that go together, so that the first-level cache holds the turned columns of a group.
inline constexpr int64_t kSteps = 8;

// Rows of which other columns are wanted soon.
struct RowsAhead {
  const Bf16* const* rows;
  int64_t count, offset;

  EHC_SIMD void fetch(int64_t column) const {
    for (int64_t i = 0; i < count; ++i) simd::prefetch(rows[i] + column + offset);
  }
};
// Of a tile's rows so many are fetched while tokens are turned, the others while tiles are
// multiplied: fetched at once they would fill the queue to the memory and hold all loads up.
inline constexpr int64_t kFetchedTurning = 12;

// Parts of kMixes mixes times kTokens tiles of tokens over some steps; the tiles of a step lie side
// by side. Sums of a tile of tokens: [3 * kMixes, 16]; they go on unless they begin.
template <int kTokens>
EHC_SIMD void multiply_tiles(const float* parts, const float* tokens, int64_t steps, bool begins,
                             const RowsAhead (&ahead)[2], float* sums) {
  if (begins) {
    simd::zero_tile<kWhole0>();
    simd::zero_tile<kHalf0>();
    simd::zero_tile<kWhole1>();
    simd::zero_tile<kHalf1>();
  } else {
    simd::load_tile<kWhole0>(sums);
    simd::load_tile<kHalf0>(sums + kTileFloats);
    if constexpr (kTokens > 1) {
      simd::load_tile<kWhole1>(sums + kPartTiles);
      simd::load_tile<kHalf1>(sums + kPartTiles + kTileFloats);
    }
  }
  for (int64_t s = 0; s < steps; ++s, parts += kPartTiles, tokens += kTokens * kTileFloats) {
    for (int i = 0; i < kTokens; ++i) ahead[i].fetch(s * kTileDepth);
    simd::load_tile<kTokens0>(tokens);
    simd::stream_tile<kWholeParts>(parts);
    simd::multiply_tiles<kWhole0, kWholeParts, kTokens0>();
    simd::stream_tile<kHalfParts>(parts + kTileFloats);
    simd::multiply_tiles<kHalf0, kHalfParts, kTokens0>();
    if constexpr (kTokens > 1) {
      simd::load_tile<kTokens1>(tokens + kTileFloats);
      simd::multiply_tiles<kWhole1, kWholeParts, kTokens1>();
      simd::multiply_tiles<kHalf1, kHalfParts, kTokens1>();
    }
  }
  simd::store_tile<kWhole0>(sums);
  simd::store_tile<kHalf0>(sums + kTileFloats);
  if constexpr (kTokens > 1) {
    simd::store_tile<kWhole1>(sums + kPartTiles);
    simd::store_tile<kHalf1>(sums + kPartTiles + kTileFloats);
  }
}

// Sums of squares of 16 tokens, in chains.
struct Squares {
  static constexpr int kChains = 8;
  Vec chain[kChains];

  void clear() {
    for (Vec& sum : chain) sum = simd::zero();
  }
  [[nodiscard]] Vec total() const {
    Vec sums[kChains / 2];
    for (int i = 0; i < kChains / 2; ++i) sums[i] = simd::add(chain[2 * i], chain[2 * i + 1]);
    return simd::add(simd::add(sums[0], sums[1]), simd::add(sums[2], sums[3]));
  }
};

// Columns of up to 16 tokens become right factors: pair r of step s of token i goes to
// [s, r * 16 + i], steps `pitch` floats apart; tokens and columns that do not exist are zeros.
inline void turn_tokens(const Bf16* const* rows, int64_t tokens, int64_t begin, int64_t end,
                        const RowsAhead& ahead, float* to, int64_t pitch, Squares& squares) {
  for (int64_t k = begin; k < end; k += kTileDepth, to += pitch) {
    Vec pairs[kTileRows];
    for (int64_t i = 0; i < kTileRows; ++i) {
      pairs[i] = i < tokens ? simd::load_pairs(rows[i] + k, end - k) : simd::zero();
    }
    ahead.fetch(k);
    simd::transpose(pairs);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      simd::store_vec(to + r * kTileRows, pairs[r]);
      Vec& sum = squares.chain[r % Squares::kChains];
      sum = simd::add_squares(sum, pairs[r]);
    }
  }
}

// A chunk of all tokens of a call.
class TileProduct {
 public:
  // Sums are columns of 16 tokens.
  static constexpr int64_t kStep = kTileRows;

  TileProduct(const PrenormGemmArgs& a, int64_t first_token, int64_t tokens, const Scratch& s)
      : a_(a), streams_(a, first_token), tokens_(tokens), scratch_(s) {}

  void prepare(const Chunk&) const {}
  void multiply(int64_t first, const Chunk& chunk, const Ahead& ahead, float* sums) {
    columns_ = chunk.columns;
    place_ = chunk.place;
    elements_ahead_ = ahead.elements;
    const int64_t left = tokens_ - first, tokens = left < kPrenormGroup ? left : kPrenormGroup;
    const int64_t tiles = tokens > kTileRows ? 2 : 1, width = columns_.end - columns_.begin;
    const Bf16* rows[kPrenormGroup];
    find_rows(first, tokens, rows);
    Squares squares[2];
    for (Squares& of_tile : squares) of_tile.clear();
    float* turned = scratch_.widened;
    float* products = turned + 2 * kSteps * kTileFloats;
    for (int64_t k = 0; k < width; k += kSteps * kTileDepth) {
      const int64_t rest = width - k,
                    end = rest < kSteps * kTileDepth ? width : k + kSteps * kTileDepth;
      for (int64_t i = 0; i < tiles; ++i) {
        turn_tokens(rows + i * kTileRows, tokens - i * kTileRows, k, end,
                    rows_ahead(first, i, 0, kFetchedTurning, rows), turned + i * kTileFloats,
                    tiles * kTileFloats, squares[i]);
      }
      ahead.fn->fetch(kTileRows);
      const int64_t steps = (end - k + kTileDepth - 1) / kTileDepth;
      for (int64_t j = 0; j < a_.mixes; j += kMixes) {
        float* parts = parts_of_mixes(j, k);
        if (first == 0) take_parts(j, k, end, parts);
        constexpr int64_t kLater = kTileRows - kFetchedTurning;
        const int64_t from = kFetchedTurning + kLater * j / a_.mixes;
        const int64_t until = kFetchedTurning + kLater * (j + mixes_from(j)) / a_.mixes;
        RowsAhead rows_wanted[2];
        for (int64_t i = 0; i < 2; ++i) {
          rows_wanted[i] = rows_ahead(first, i, from, until, rows);
          rows_wanted[i].offset += k;
        }
        float* to = products + j / kMixes * 2 * kPartTiles;
        if (tiles > 1) {
          multiply_tiles<2>(parts, turned, steps, k == 0, rows_wanted, to);
        } else {
          multiply_tiles<1>(parts, turned, steps, k == 0, rows_wanted, to);
        }
      }
    }
    for (int64_t i = 0; i < tiles; ++i, sums += (a_.mixes + 1) * kTileRows) {
      for (int64_t j = 0; j < a_.mixes; j += kMixes) {
        add_parts(products + (j / kMixes * 2 + i) * kPartTiles, mixes_from(j),
                  sums + j * kTileRows);
      }
      simd::store_vec(sums + a_.mixes * kTileRows, squares[i].total());
    }
  }

  [[nodiscard]] int64_t place(int64_t token) const {
    return token / kTileRows * (a_.mixes + 1) * kTileRows + token % kTileRows;
  }
  [[nodiscard]] int64_t floats(int64_t tokens) const {
    return (tokens + kTileRows - 1) / kTileRows * (a_.mixes + 1) * kTileRows;
  }

 private:
  [[nodiscard]] int64_t mixes_from(int64_t j) const {
    return a_.mixes - j < kMixes ? a_.mixes - j : kMixes;
  }
  // Parts that serve one group are made where the first-level cache has room for them.
  [[nodiscard]] float* parts_of_mixes(int64_t j, int64_t k) const {
    if (tokens_ <= kPrenormGroup) return scratch_.fn;
    const int64_t sets = (a_.mixes + kMixes - 1) / kMixes;
    return scratch_.fn +
           ((place_ * sets + j / kMixes) * kChunkColumns + k) / kTileDepth * kPartTiles;
  }

  // Rows [from, until) of a tile of the group at `first`, and how far the columns are that are
  // wanted after those at hand: those of the next group, or of the next chunk.
  [[nodiscard]] RowsAhead rows_ahead(int64_t first, int64_t tile, int64_t from, int64_t until,
                                     const Bf16* const* rows) const {
    if (!streams_.side_by_side()) return {rows, 0, 0};
    const int64_t left = tokens_ - first - tile * kTileRows;
    if (left < until) until = left;
    return {rows + tile * kTileRows + from, until - from, elements_ahead_};
  }

  void find_rows(int64_t first, int64_t tokens, const Bf16** rows) const {
    for (int64_t i = 0; i < tokens; ++i) {
      rows[i] = streams_.at(first + i, columns_.begin);
      if (streams_.side_by_side()) continue;
      Bf16* room = reinterpret_cast<Bf16*>(scratch_.rows) + i * kChunkColumns;
      streams_.copy(first + i, columns_, room);
      rows[i] = room;
    }
  }

  // Part i of mix j + m goes to row i * kMixes + m of a step's parts.
  void take_parts(int64_t j, int64_t begin, int64_t end, float* to) const {
    for (int64_t m = 0; m < mixes_from(j); ++m, to += kTileRows) {
      float room[kSteps * kTileDepth];
      const float* row = fn_row(a_, j + m, columns_.begin + begin, end - begin, room);
      float* part = to;
      for (int64_t k = 0; k < end - begin; k += kTileDepth, part += kPartTiles) {
        const Pair x = simd::evens_and_odds(simd::load_some(row + k, end - begin - k));
        const PartPairs parts = parts_of(simd::quiet_nan(x));
        for (int i = 0; i < kParts; ++i) {
          simd::store_vec(part + i * kMixes * kTileRows, parts.part[i]);
        }
      }
    }
  }

  // Of 16 tokens.
  static void add_parts(const float* products, int64_t mixes, float* to) {
    constexpr int64_t kPart = kMixes * kTileRows;
    const Vec second = simd::splat(1 / kSecondScale), third = simd::splat(1 / kThirdScale);
    for (int64_t at = 0; at < mixes * kTileRows; at += kTileRows) {
      const Vec first = simd::load_vec(products + at);
      const Vec rest = simd::fma(third, simd::load_vec(products + 2 * kPart + at),
                                 simd::load_vec(products + kPart + at));
      simd::store_vec(to + at, simd::unless_nan(simd::fma(second, rest, first), first));
    }
  }

  const PrenormGemmArgs& a_;
  StreamColumns<Bf16> streams_;
  int64_t tokens_;
  const Scratch& scratch_;
  Columns columns_{};
  int place_ = 0;
  int64_t elements_ahead_ = 0;
};

}  // namespace

void prenorm_gemm_block(const PrenormGemmArgs& a, int64_t split, int64_t begin, int64_t end,
                        float* scratch) {
  const simd::Tiles tiles(kShapes);
  const Scratch arrays(a, end - begin, scratch);
  TileProduct product(a, begin, end - begin, arrays);
  for (int64_t g = 0; g < a.groups; ++g) {
    project_columns(a, product, arrays, split, g, begin, end);
  }
}

}  // namespace ehc::mhc::EHC_ISA
