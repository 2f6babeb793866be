// Work on whole rows that is done ahead of a convolution, piece by piece between its tiles.
#pragma once

#include "backends/cpu/simd.h"

namespace ehc::engram::EHC_ISA {
namespace {

namespace simd = ehc::simd::EHC_ISA;

// Elements between what a row reads and what it prefetches.
inline constexpr int64_t kFarAhead = 4096;

// Walks over the rows of tokens in order, image tokens left out. Row has
//   open(token, stream)  starts a row
//   add(column, count)   takes up to a pair of its columns
//   close()              ends it
template <class Row>
class WalkAhead {
 public:
  WalkAhead(const Row& row, const uint8_t* mask, int64_t streams, int64_t hidden)
      : row_(row), mask_(mask), streams_(streams), hidden_(hidden) {}

  void open(int64_t begin, int64_t end) {
    token_ = begin;
    end_ = end;
    next_row();
  }
  EHC_SIMD void work() {
    if (token_ == end_) return;
    for (int p = 0; p < simd::kPairsTogether && column_ < hidden_; ++p, column_ += simd::kPair) {
      row_.add(column_, hidden_ - column_);
    }
    if (column_ >= hidden_) close_row();
  }
  void finish() {
    while (token_ != end_) work();
  }

 private:
  void close_row() {
    row_.close();
    if (++stream_ == streams_) {
      stream_ = 0;
      ++token_;
    }
    next_row();
  }
  void next_row() {
    while (token_ != end_ && mask_ && mask_[token_]) ++token_;
    if (token_ == end_) return;
    row_.open(token_, stream_);
    column_ = 0;
  }

  Row row_;
  const uint8_t* mask_;
  int64_t streams_, hidden_;
  int64_t token_ = 0, end_ = 0, stream_ = 0, column_ = 0;
};

}  // namespace
}  // namespace ehc::engram::EHC_ISA
