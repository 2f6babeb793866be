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

// The gate of a row, for WalkAhead. Keep has
//   keep(token, stream, scalars, value_square)   takes a gate, value_square = mean(v^2)
//   fetch(token, stream, column)                 is called for every pair of columns on the way
template <class A, class Keep>
struct GateAhead {
  const GateForwardArgs& args;
  Keep& keeper;
  int64_t token = 0, stream = 0;
  float value_square = 0;
  const A* next_value = nullptr;
  GateRow<A> row{};
  GateSums sums{};

  void open(int64_t of_token, int64_t of_stream) {
    token = of_token;
    stream = of_stream;
    if (stream == 0) {
      value_square = mean_square_of_value<A>(args, token);
      next_value = value_row<A>(args, token) + args.value_token_stride;
    }
    row = gate_row<A>(args, token, stream);
    sums = GateSums{};
  }
  EHC_SIMD void add(int64_t column, int64_t count) {
    simd::prefetch(row.residual + column + kFarAhead);
    simd::prefetch(row.key + column + kFarAhead);
    if (stream == 0) simd::prefetch(next_value + column);
    keeper.fetch(token, stream, column);
    gate_sum_pair(sums, row, column, count);
  }
  void close() {
    keeper.keep(token, stream, gate_scalars(sums, row, args.hidden, args.eps, args.clamp),
                value_square);
  }
};

template <class A, class Keep>
WalkAhead<GateAhead<A, Keep>> gates_ahead(const GateForwardArgs& args, Keep& keep) {
  return {GateAhead<A, Keep>{args, keep}, args.image_token_mask, args.streams, args.hidden};
}

}  // namespace
}  // namespace ehc::engram::EHC_ISA
