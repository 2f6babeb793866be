// As many tokens as a vector has lanes: a value of each token in a lane.
#pragma once

#include "ops/mhc/shared/stream_rows_simd.h"

namespace ehc::mhc::EHC_ISA {
namespace {

// A vector as a number, for mathematics that is written for any kind of number.
struct Lanes {
  simd::Vec v;
};
EHC_SIMD Lanes lanes(float x) { return {simd::splat(x)}; }
EHC_SIMD Lanes add(Lanes x, Lanes y) { return {simd::add(x.v, y.v)}; }
EHC_SIMD Lanes sub(Lanes x, Lanes y) { return {simd::sub(x.v, y.v)}; }
EHC_SIMD Lanes mul(Lanes x, Lanes y) { return {simd::mul(x.v, y.v)}; }
EHC_SIMD Lanes div(Lanes x, Lanes y) { return {simd::div(x.v, y.v)}; }
EHC_SIMD Lanes fma(Lanes x, Lanes y, Lanes z) { return {simd::fma(x.v, y.v, z.v)}; }
EHC_SIMD Lanes exp_nonpositive(Lanes x) { return {simd::exp_nonpositive(x.v)}; }
EHC_SIMD Lanes max_keep_nan(Lanes bound, Lanes x) { return {simd::max_keep_nan(bound.v, x.v)}; }
EHC_SIMD Lanes select_negative(Lanes x, Lanes negative, Lanes positive) {
  return {simd::select_negative(x.v, negative.v, positive.v)};
}

// Rows of `count` values, one for each of at most kLanes tokens, become x[0 .. count). Lanes
// without a token get zeros. `row(i)` is where the values of token i stand.
template <class Row>
EHC_SIMD void load_tokens(const Row& row, int64_t tokens, int64_t count, Lanes* x) {
  for (int64_t j = 0; j < count; j += simd::kPair) {
    simd::Vec low[simd::kLanes], high[simd::kLanes];
    for (int64_t i = 0; i < simd::kLanes; ++i) {
      const simd::Pair values =
          i < tokens ? simd::load_some(row(i) + j, count - j) : simd::zero_pair();
      low[i] = values.a;
      high[i] = values.b;
    }
    simd::transpose(low);
    for (int64_t i = 0; i < simd::kLanes && j + i < count; ++i) x[j + i].v = low[i];
    if (j + simd::kLanes >= count) break;
    simd::transpose(high);
    const int64_t at = j + simd::kLanes;
    for (int64_t i = 0; i < simd::kLanes && at + i < count; ++i) x[at + i].v = high[i];
  }
}

// The way back.
template <class Row>
EHC_SIMD void store_tokens(const Lanes* x, int64_t tokens, int64_t count, const Row& row) {
  for (int64_t j = 0; j < count; j += simd::kPair) {
    simd::Vec low[simd::kLanes], high[simd::kLanes];
    for (int64_t i = 0; i < simd::kLanes; ++i) {
      low[i] = j + i < count ? x[j + i].v : simd::zero();
      high[i] = j + simd::kLanes + i < count ? x[j + simd::kLanes + i].v : simd::zero();
    }
    simd::transpose(low);
    if (j + simd::kLanes < count) simd::transpose(high);
    for (int64_t i = 0; i < tokens; ++i) {
      simd::store_some(row(i) + j, {low[i], high[i]}, count - j, false);
    }
  }
}

}  // namespace
}  // namespace ehc::mhc::EHC_ISA
