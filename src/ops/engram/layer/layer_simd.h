// The gates of a layer's tokens, taken ahead of the convolution: forward and backward.
#pragma once

#include "ops/engram/conv/conv_simd.h"
#include "ops/engram/gate/gate_simd.h"

namespace ehc::engram::EHC_ISA {
namespace {

template <class A>
inline float mean_square_of_value(const GateForwardArgs& args, int64_t token) {
  return mean_square(value_row<A>(args, token), args.hidden);
}

// Gates of tokens in order, a piece of a row at a time. Keep has
//   keep(token, stream, scalars, value_square)   takes a gate, value_square = mean(v^2)
//   fetch(token, stream, column)                 is called for every pair of columns on the way
template <class A, class Keep>
class GatesAhead {
 public:
  GatesAhead(const GateForwardArgs& gate, Keep& keep) : gate_(gate), keep_(keep) {}

  void open(int64_t begin, int64_t end) {
    token_ = begin;
    end_ = end;
    next_row();
  }
  EHC_SIMD void work() {
    if (token_ == end_) return;
    const int64_t hidden = gate_.hidden;
    for (int p = 0; p < kTilePairs && column_ < hidden; ++p, column_ += kPair) {
      simd::prefetch(row_.residual + column_ + kFarAhead);
      simd::prefetch(row_.key + column_ + kFarAhead);
      if (stream_ == 0) simd::prefetch(next_value_ + column_);
      keep_.fetch(token_, stream_, column_);
      gate_sum_pair(sums_, row_, column_, hidden - column_);
    }
    if (column_ >= hidden) close_row();
  }
  void finish() {
    while (token_ != end_) work();
  }

 private:
  // Elements between what is read and what is prefetched.
  static constexpr int64_t kFarAhead = 4096;

  void close_row() {
    keep_.keep(token_, stream_, gate_scalars(sums_, row_, gate_.hidden, gate_.eps, gate_.clamp),
               value_square_);
    if (++stream_ == gate_.streams) {
      stream_ = 0;
      ++token_;
    }
    next_row();
  }
  void next_row() {
    while (token_ != end_ && masked(gate_.image_token_mask, token_)) ++token_;
    if (token_ == end_) return;
    if (stream_ == 0) {
      value_square_ = mean_square_of_value<A>(gate_, token_);
      next_value_ = value_row<A>(gate_, token_) + gate_.value_token_stride;
    }
    row_ = gate_row<A>(gate_, token_, stream_);
    column_ = 0;
    sums_ = GateSums{};
  }

  const GateForwardArgs& gate_;
  Keep& keep_;
  int64_t token_ = 0, end_ = 0, stream_ = 0, column_ = 0;
  float value_square_ = 0;
  const A* next_value_ = nullptr;
  GateRow<A> row_{};
  GateSums sums_;
};

}  // namespace
}  // namespace ehc::engram::EHC_ISA
