// Tiles of AMX: eight registers of 16 rows of 64 bytes, and what multiplies them. With simd.h, for
// <op>_amx.cc.
//
// multiply_tiles: sum[m,n] += sum over k < 32 of x[m,k] y[k,n] for bf16 x and y, fp32 sums. Rows of
// x are 32 columns side by side; row r of y holds columns 2r and 2r+1 of n = 0, of n = 1, ... The
// processor adds the products of even k in ascending order, so those of odd k, adds the two and
// then the sum, each addition rounded to nearest even. x and y change places without a change of
// bits. Subnormal factors, products and sums become zeros.
#pragma once

#include "backends/cpu/simd_tile.h"

namespace ehc::simd::EHC_ISA {
namespace {

inline constexpr int64_t kTileRows = 16;
inline constexpr int64_t kTileDepth = 32;                      // bf16 columns of a row
inline constexpr int64_t kTileFloats = kTileRows * kTileRows;  // a tile in memory

struct alignas(64) TileShapes {
  uint8_t palette = 1, first_row = 0, reserved[14] = {};
  uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles can be used while one of these lives.
class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" : : "m"(shapes)); }
  ~Tiles() { __asm__ volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Assembly, because the tile of an intrinsic must be a literal.
template <int kTile>
EHC_SIMD void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
// From or to 1 KB.
template <int kTile>
EHC_SIMD void load_tile(const void* p) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(64L), "i"(kTile) : "memory");
}
// The same of what is not wanted in the first-level cache.
template <int kTile>
EHC_SIMD void stream_tile(const void* p) {
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(64L), "i"(kTile) : "memory");
}
template <int kTile>
EHC_SIMD void store_tile(void* p) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(64L), "i"(kTile) : "memory");
}
template <int kSum, int kX, int kY>
EHC_SIMD void multiply_tiles() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kX), "i"(kY));
}

// --- bf16 numbers in pairs: a lane holds an even column below an odd one ---

// Pairs as they stand in memory, of which `count` columns exist.
EHC_SIMD Vec load_pairs(const Bf16* p, int64_t count) {
  const __m512i bits = count >= kTileDepth
                           ? _mm512_loadu_si512(p)
                           : _mm512_maskz_loadu_epi16(first_lanes(static_cast<int>(count)), p);
  return _mm512_castsi512_ps(bits);
}
// sum + x^2 of both columns of each pair, subnormal squares and sums as zeros.
EHC_SIMD Vec add_squares(Vec sum, Vec pairs) {
  __m512bh x;
  std::memcpy(&x, &pairs, sizeof x);
  return _mm512_dpbf16_ps(sum, x, x);
}
EHC_SIMD Vec upper_halves(Vec x) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
// The upper halves of both; those of `odd` have nothing below them.
EHC_SIMD Vec pairs_of(Vec even, Vec odd) {
  return _mm512_castsi512_ps(
      _mm512_or_si512(_mm512_castps_si512(odd), _mm512_srli_epi32(_mm512_castps_si512(even), 16)));
}
// Columns 0, 2, ... and 1, 3, ... of a pair of vectors in natural order.
EHC_SIMD Pair evens_and_odds(Pair x) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return {_mm512_permutex2var_ps(x.a, even, x.b), _mm512_permutex2var_ps(x.a, odd, x.b)};
}
// NaN whose lower half can be cut off.
EHC_SIMD Pair quiet_nan(Pair x) {
  if (_mm512_cmp_ps_mask(x.a, x.b, _CMP_UNORD_Q) == 0) [[likely]]
    return x;
  const auto quiet = [](Vec v) EHC_SIMD_LAMBDA {
    const __m512i bits = _mm512_castps_si512(v);
    return _mm512_castsi512_ps(_mm512_mask_or_epi32(bits, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q),
                                                    bits, _mm512_set1_epi32(0x400000)));
  };
  return {quiet(x.a), quiet(x.b)};
}
// `x`, or `instead` in lanes where it is NaN.
EHC_SIMD Vec unless_nan(Vec x, Vec instead) {
  return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), instead);
}

}  // namespace
}  // namespace ehc::simd::EHC_ISA
