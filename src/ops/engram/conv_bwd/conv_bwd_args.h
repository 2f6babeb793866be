// Arguments of the kernels of the convolution's backward pass.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.h"
#include "ops/engram/conv/conv_args.h"

namespace ehc::engram {

// A gradient F32[n,d,w] or F32[n,d] (channel_stride 1), and what it is added to (data null:
// nothing).
struct ConvWeightGradient {
  float* data = nullptr;
  int64_t stream_stride = 0, channel_stride = 1;
  const float* target = nullptr;
  int64_t target_stream_stride = 0, target_channel_stride = 1;
};

// Sums over tokens are cut into chunks that T alone decides: 64 of them, or fewer, down to 16,
// where they would be shorter than 256 tokens. A chunk computes the gates of its neighbours' tokens
// anew, so that it should be long.
EHC_HD int64_t conv_bwd_chunk(int64_t tokens) {
  const int64_t share = tokens / 64 + (tokens % 64 != 0 ? 1 : 0);
  const int64_t sixteenth = tokens / 16 < 256 ? tokens / 16 : 256;
  const int64_t least = sixteenth < 64 ? 64 : sixteenth;
  return share < least ? least : share;
}
EHC_HD int64_t conv_bwd_chunks(int64_t tokens) {
  const int64_t size = conv_bwd_chunk(tokens);
  return tokens / size + (tokens % size != 0 ? 1 : 0);
}

// Rows of partial sums of a chunk and stream, one a tap: the sums over tokens of gc n; [P, n, w].
struct ConvPartials {
  float* data = nullptr;
  int64_t chunks = 0, streams = 0, taps = 0, row = 0;
  EHC_HD int64_t stream_floats() const { return taps * row; }
  EHC_HD int64_t chunk_floats() const { return streams * stream_floats(); }
  EHC_HD int64_t floats() const { return chunks * chunk_floats(); }
  EHC_HD float* of(int64_t chunk, int64_t stream) const {
    return data + chunk * chunk_floats() + stream * stream_floats();
  }
};

// What becomes of the partial sums, whose rows are in the order of lanes of the activations, as
// those of the weights.
struct ConvSumArgs {
  DType activation = DType::none;
  int64_t hidden = 0;
  ConvPartials partials;
  ConvWeightGradient of_taps, of_norm;
  const float* prepared = nullptr;
};

struct ConvBackwardArgs {
  ConvForwardArgs forward;         // what the forward read; `out` is not used
  const void* grad_out = nullptr;  // A[T,n,d]
  int64_t grad_token_stride = 0, grad_stream_stride = 0;
  void* grad_value = nullptr;  // A[T,n,d]
  int64_t grad_value_token_stride = 0, grad_value_stream_stride = 0;
  ConvSumArgs sums;
};

// Tokens of a run at most, and whether runs are computed in tiles of columns that hold their
// history and what is carried from run to run; else token by token. No gradient of a token depends
// on it.
inline constexpr int64_t kConvTileHistory = 128;
EHC_HD bool conv_bwd_in_tiles(int64_t history) { return history <= kConvTileHistory; }
EHC_HD int64_t conv_bwd_run(int64_t history, int64_t token_bytes) {
  int64_t run = (int64_t{1} << 19) / token_bytes;
  run = run < 8 ? 8 : run > 32 ? 32 : run;
  return run < history ? history : run;
}

// Floats of scratch of ConvGradient (conv_bwd_simd.h), for streams that take turns.
inline constexpr int64_t kConvTileColumns = 32;  // at most: a pair of vectors
struct ConvGradientSizes {
  int64_t tile_rows, final_rows, carry;
  EHC_HD int64_t floats(int64_t row) const {
    return 2 * tile_rows * kConvTileColumns + final_rows * (row + kConvTileColumns) + carry;
  }
};
EHC_HD ConvGradientSizes conv_gradient_sizes(int64_t history, int64_t run, int64_t streams,
                                             int64_t hidden) {
  if (!conv_bwd_in_tiles(history)) return {0, 1, 0};
  const int64_t rows = history + (run < history ? history : run);
  return {rows, rows, streams * history * conv_prepared_row(hidden)};
}

// Scratch of one piece: whole cache lines.
EHC_HD int64_t whole_lines(int64_t floats) { return (floats + 15) / 16 * 16; }

// Floats of `prepared`: those of conv_prepare, then taps times norm weight.
EHC_HD int64_t conv_bwd_prepared_floats(int64_t taps, int64_t streams, int64_t hidden) {
  return conv_prepared_floats(taps, streams, hidden) + taps * streams * conv_prepared_row(hidden);
}

// In this order:
// 1. the prepared rows of streams [begin, end);
EHC_CPU_KERNEL(void conv_bwd_prepare(const ConvForwardArgs& args, int64_t begin, int64_t end));
// 2. items [begin, end) of P*n: item q is stream q % n of chunk q / n. `scratch`:
//    conv_bwd_scratch_floats;
EHC_CPU_KERNEL(void conv_bwd_items(const ConvBackwardArgs& args, int64_t begin, int64_t end,
                                   float* scratch));
// 3. the sums of blocks [begin, end) of n*conv_sum_blocks(d) of kConvTileColumns columns.
EHC_HD int64_t conv_sum_blocks(int64_t hidden) {
  return conv_prepared_row(hidden) / kConvTileColumns;
}
EHC_CPU_KERNEL(void conv_bwd_sums(const ConvSumArgs& args, int64_t begin, int64_t end));

// Bytes that a token of a run and stream keeps busy: two rows of activations and one of fp32.
EHC_HD int64_t conv_bwd_token_bytes(int64_t hidden, int64_t element) {
  return hidden * (2 * element + 4);
}
EHC_HD int64_t conv_bwd_scratch_floats(int64_t tokens, int64_t history, int64_t hidden,
                                       int64_t element) {
  const int64_t run = conv_bwd_run(history, conv_bwd_token_bytes(hidden, element));
  const int64_t floats =
      conv_gradient_sizes(history, run, 1, hidden).floats(conv_prepared_row(hidden));
  const int64_t before = history < tokens ? history : tokens;
  return floats + 2 * before + conv_bwd_chunk(tokens);
}

}  // namespace ehc::engram
