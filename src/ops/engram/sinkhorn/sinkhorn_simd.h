// Rows and columns of a scaled update on SIMD lanes, for the sinkhorn operators and the whole
// optimizer step.
#pragma once

#include "backends/cpu/simd.h"
#include "ops/engram/sinkhorn/sinkhorn_args.h"
#include "ops/engram/sinkhorn/sinkhorn_math.h"

namespace ehc::engram::EHC_ISA {
namespace {

namespace simd = ehc::simd::EHC_ISA;
using simd::kPair;
using simd::Pair;
using simd::Vec;

// The first `count` elements, and zeros.
EHC_SIMD Pair first_elements(Pair x, int64_t count) {
  float row[kPair];
  simd::store(row, x);
  return simd::load_tail(row, static_cast<int>(count));
}

// x[r,j] = (row_scale * update[j]) * col_scale[j] for a pair of columns; zeros past the last one,
// whatever the scales are.
EHC_SIMD Pair scaled_pair(const float* update, Vec row_scale, const float* col_scale,
                          int64_t count) {
  const Pair x =
      mul(mul(simd::load_some(update, count), row_scale), simd::load_some(col_scale, count));
  return count < kPair ? first_elements(x, count) : x;
}

// One row of x; `is_dense`: the next rows follow it in memory and are fetched while its norm is
// taken.
struct ScaledRow {
  const float* update;
  bool is_dense;
  float scale;
};

EHC_SIMD bool is_dense(const ScaledUpdate& x) { return x.update_stride < x.width + 16; }

// To be called once for each cache line, in order. A core that reads one page after the other has
// too few lines in flight, since the processor foresees no further than the border of a page. So
// the four pages behind this one are fetched together, each a quarter as fast as lines are read:
// their last, third, second and first quarter.
EHC_SIMD void fetch_behind(const float* p) {
  constexpr uintptr_t kPage = 4096, kLine = 64, kQuarter = kPage / 4;
  const uintptr_t in_page = reinterpret_cast<uintptr_t>(p) % kPage, line = in_page / kLine;
  const uintptr_t ahead = kPage + 3 * kQuarter + line % 4 * (kPage - kQuarter) + line / 4 * kLine;
  simd::prefetch(reinterpret_cast<const char*>(p) + (ahead - in_page));
}

// sum x^2 of a row. The same loop calls also(j, count) for each pair of columns: work on an earlier
// row, so that waiting for memory and arithmetic mix.
template <class Also>
EHC_SIMD float row_squares(const ScaledRow& row, const float* col_scale, int64_t width,
                           const Also& also) {
  const Vec scale = simd::splat(row.scale);
  Pair sum = simd::zero_pair();
  const auto add_pair = [&](int64_t j, int64_t count) EHC_SIMD_LAMBDA {
    if (row.is_dense) {
      fetch_behind(row.update + j);
      if constexpr (kPair > 16) fetch_behind(row.update + j + 16);
    }
    const Pair x = scaled_pair(row.update + j, scale, col_scale + j, count);
    sum = fma(x, x, sum);
    also(j, count);
  };
  int64_t j = 0;
  for (; j + kPair <= width; j += kPair) add_pair(j, kPair);  // whole pairs: no test inside
  if (j < width) add_pair(j, width - j);
  return simd::reduce_add(sum);
}

// A row with the scale that gives it norm 1.
struct NormalRow {
  const float* update;
  float scale;
};

// sums += x^2 for a pair of columns.
EHC_SIMD void add_squares(Pair x, float* sums, int64_t count) {
  simd::store_some(sums, fma(x, x, simd::load_some(sums, count)), count, false);
}

// Rows whose norms are known and that wait to be worked on, while the next norms are taken: so many
// that a norm is there when it is wanted, and so few that the cache still has the row.
template <class Row>
class WaitingRows {
 public:
  static constexpr uint64_t kRows = 4;
  EHC_SIMD bool is_full() const { return found_ - done_ == kRows; }
  EHC_SIMD bool is_empty() const { return found_ == done_; }
  EHC_SIMD void add(const Row& row) { rows_[found_++ % kRows] = row; }
  EHC_SIMD uint64_t found() const { return found_; }
  EHC_SIMD Row take() { return rows_[done_++ % kRows]; }

 private:
  Row rows_[kRows] = {};
  uint64_t found_ = 0, done_ = 0;
};

// sum (x * unit)^2 of a row.
inline float row_squares_in_unit(const ScaledRow& row, const float* col_scale, int64_t width,
                                 float unit) {
  const Vec scale = simd::splat(row.scale);
  Pair sum = simd::zero_pair();
  for (int64_t j = 0; j < width; j += kPair) {
    const Pair x =
        mul(scaled_pair(row.update + j, scale, col_scale + j, width - j), simd::splat(unit));
    sum = fma(x, x, sum);
  }
  return simd::reduce_add(sum);
}

// Norm of a row, with work on a waiting row on the way: work(waiting row, j, count) for each pair
// of columns.
template <class Row, class Work>
EHC_SIMD float norm_and_work(const ScaledRow& row, const float* col_scale, int64_t width,
                             WaitingRows<Row>& waiting, const Work& work) {
  float squares;
  if (waiting.is_full()) {
    const Row earlier = waiting.take();
    squares = row_squares(row, col_scale, width, [&](int64_t j, int64_t count) EHC_SIMD_LAMBDA {
      work(earlier, j, count);
    });
  } else {
    squares = row_squares(row, col_scale, width, [](int64_t, int64_t) EHC_SIMD_LAMBDA {});
  }
  return norm_of(squares, [&](float unit) EHC_SIMD_LAMBDA {
    return row_squares_in_unit(row, col_scale, width, unit);
  });
}

template <class Row, class Work>
EHC_SIMD void finish_work(int64_t width, WaitingRows<Row>& waiting, const Work& work) {
  while (!waiting.is_empty()) {
    const Row row = waiting.take();
    for (int64_t j = 0; j < width; j += kPair) work(row, j, width - j);
  }
}

}  // namespace
}  // namespace ehc::engram::EHC_ISA
