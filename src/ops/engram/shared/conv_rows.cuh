// The short convolution on CUDA once the norms of its rows are known, shared by engram.conv_fwd and
// engram.layer_fwd: same functions, same bits.
#pragma once

#include "backends/cuda/async_copy.cuh"
#include "core/float_formats.h"
#include "ops/engram/conv/conv_args.h"
#include "ops/engram/conv/conv_math.h"
#include "ops/engram/shared/row_packs.cuh"
#include "ops/engram/shared/silu.cuh"

namespace ehc::engram {

// A sequence, tokens [begin, end).
struct SequenceAt {
  int64_t index, begin, end;
};

// Finds the sequences of ascending tokens.
class SequenceCursor {
 public:
  __device__ SequenceCursor(const ShortConv& conv, int64_t tokens, int64_t token)
      : borders_(conv.cu_seqlens), at_{0, 0, tokens} {
    if (borders_ == nullptr) return;
    int64_t low = 0;  // the last sequence that starts at or before the token
    int64_t high = conv.sequences;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (borders_[middle] <= token ? low : high) = middle;
    }
    at_ = {low, borders_[low], borders_[low + 1]};
  }
  __device__ __forceinline__ const SequenceAt& of(int64_t token) {
    while (token >= at_.end) {
      ++at_.index;
      at_.begin = at_.end;
      at_.end = borders_[at_.index + 1];
    }
    return at_;
  }

 private:
  const int32_t* borders_;
  SequenceAt at_;
};

// What stands for position `t`, before the start of the sequence.
__device__ __forceinline__ const float* state_row(const ShortConv& conv, const SequenceAt& sequence,
                                                  int64_t t, int64_t h) {
  const int64_t position = t - sequence.begin + conv_history(conv.taps, conv.dilation);
  return conv.state.data + sequence.index * conv.state.sequence_stride +
         position * conv.state.position_stride + h * conv.state.stream_stride;
}

__device__ __forceinline__ float tap_weight(const ShortConv& conv, int64_t h, int64_t i,
                                            int64_t k) {
  return load_float(conv.conv_weight, conv.weight,
                    h * conv.conv_weight_stream_stride + i * conv.conv_weight_channel_stride + k);
}
__device__ __forceinline__ float norm_weight(const ShortConv& conv, int64_t h, int64_t i) {
  return load_float(conv.norm_weight, conv.norm_weight_type,
                    h * conv.norm_weight_stream_stride + i);
}

// u = (value * scale) * norm weight
__device__ __forceinline__ float conv_normalised(float value, float scale, float norm) {
  return value * scale * norm;
}

inline constexpr int kChainTaps = 4;

// The convolution with four taps along a chain of tokens `dilation` apart: c of a token, the oldest
// tap first, while the sums of the next three are on their way.
template <int kColumns>
struct ConvChain {
  float pending[kChainTaps - 1][kColumns];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& sums : pending) {
#pragma unroll
      for (float& sum : sums) sum = 0;
    }
  }
  // Column i, given its u and its taps; returns c.
  __device__ __forceinline__ float step(int i, float u, const float (&tap)[kChainTaps][kColumns]) {
    const float c = fmaf(tap[3][i], u, pending[0][i]);
    pending[0][i] = fmaf(tap[2][i], u, pending[1][i]);
    pending[1][i] = fmaf(tap[1][i], u, pending[2][i]);
    pending[2][i] = fmaf(tap[0][i], u, 0.0f);
    return c;
  }
};

// Sources of the convolution have
//   args                        ConvForwardArgs: of V the rows that are read, and where Y goes
//   scale(t, h)                 what a row is multiplied by
//   kOther, other<A>(t, h)      whether finish needs another row, and which
//   finish<A, kVector>(t, h, column, value, other, c, count)   makes a pack of Y
//   image<A, kVector>(t, h, column, count)                     the same for an image token
template <class A, class Source>
__device__ __forceinline__ const A* value_row(const Source& s, int64_t t, int64_t h) {
  return static_cast<const A*>(s.args.gated_value) + t * s.args.value_token_stride +
         h * s.args.value_stream_stride;
}

// A pack of Y.
template <class A, bool kVector>
__device__ __forceinline__ void put(const ConvForwardArgs& a, int64_t t, int64_t h, int column,
                                    const Pack& pack, int64_t count) {
  A* out = static_cast<A*>(a.out) + t * a.out_token_stride + h * a.out_stream_stride;
  cuda::store_pack<kVector>(out + column, pack, count);
}

template <class Source>
__device__ __forceinline__ bool is_image(const Source& s, int64_t t) {
  return s.args.image_token_mask != nullptr && s.args.image_token_mask[t] != 0;
}

// A thread's pack of columns and its run of tokens.
struct ConvPlace {
  int64_t begin, end;
  int64_t stream;
  int column;

  template <class A>
  __device__ __forceinline__ static ConvPlace of_thread(const ConvForwardArgs& a,
                                                        unsigned column_blocks, int64_t run) {
    const unsigned block = blockIdx.x;
    const auto streams = static_cast<unsigned>(a.streams);
    const int64_t begin = block / column_blocks / streams * run;
    return {begin, min(a.tokens, begin + run), block / column_blocks % streams,
            static_cast<int>(block % column_blocks * blockDim.x + threadIdx.x) * kWidth<A>};
  }
};

inline constexpr int kConvThreads = 128;  // at most
inline constexpr int kConvStages = 4;

// Four taps and rows in packs of 16 bytes: a thread takes the tokens of its run that are
// `dilation` apart, then those beside them. The packs of the next tokens are on their way.
template <class A, class Source>
__global__ void __launch_bounds__(kConvThreads)
    conv_chains(const __grid_constant__ Source s, unsigned column_blocks, int64_t run) {
  constexpr int kColumns = kWidth<A>;
  __shared__ Pack staged[kConvStages][Source::kOther ? 2 : 1][kConvThreads];
  const ShortConv& conv = s.args.conv;
  const ConvPlace at = ConvPlace::of_thread<A>(s.args, column_blocks, run);
  if (at.column >= s.args.hidden) return;
  const int64_t h = at.stream;
  const int lane = static_cast<int>(threadIdx.x);
  float tap[kChainTaps][kColumns];
  float norm[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    norm[i] = norm_weight(conv, h, at.column + i);
#pragma unroll
    for (int k = 0; k < kChainTaps; ++k) tap[k][i] = tap_weight(conv, h, at.column + i, k);
  }
  const auto fetch = [&](int64_t t, int stage) {
    if (t < at.end) {
      cuda::start_copy(&staged[stage][0][lane], value_row<A>(s, t, h) + at.column);
      if constexpr (Source::kOther) {
        cuda::start_copy(&staged[stage][1][lane], s.template other<A>(t, h) + at.column);
      }
    }
    cuda::commit_copies();
  };
  const int64_t residues = min(conv.dilation, at.end - at.begin);
  for (int64_t r = 0; r < residues; ++r) {
    const int64_t first = at.begin + r;
    SequenceCursor cursor(conv, s.args.tokens, first);
    // With the tokens before the run that its first one sees.
    const int64_t before = (first - cursor.of(first).begin) / conv.dilation;
    const int64_t start = first - min(before, int64_t{kChainTaps - 1}) * conv.dilation;
    for (int stage = 0; stage < kConvStages; ++stage) fetch(start + stage * conv.dilation, stage);
    int stage = 0;
    ConvChain<kColumns> chain;
    for (int64_t t = start; t < at.end; t += conv.dilation) {
      const SequenceAt& sequence = cursor.of(max(t, first));
      if (t == start || t - conv.dilation < sequence.begin) {
        chain.clear();
        for (int64_t back = kChainTaps - 1; back > 0 && conv.state.data != nullptr; --back) {
          const int64_t from = t - back * conv.dilation;
          if (from >= sequence.begin) continue;
          const float* row = state_row(conv, sequence, from, h) + at.column;
#pragma unroll
          for (int i = 0; i < kColumns; ++i) chain.step(i, row[i], tap);
        }
      }
      cuda::await_copies<kConvStages - 1>();
      const bool image = is_image(s, t);
      const Pack value = staged[stage][0][lane];
      Pack other{};
      if constexpr (Source::kOther) other = staged[stage][1][lane];
      const float scale = image ? 0.0f : s.scale(t, h);
      float c[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const float u = image ? 0.0f : conv_normalised(column<A>(value, i), scale, norm[i]);
        c[i] = chain.step(i, u, tap);
      }
      fetch(t + kConvStages * conv.dilation, stage);
      stage = (stage + 1) % kConvStages;
      if (t < first) continue;
      if (image) {
        s.template image<A, true>(t, h, at.column, kColumns);
      } else {
        s.template finish<A, true>(t, h, at.column, value, other, c, kColumns);
      }
    }
    cuda::await_copies<0>();
  }
}

// Any number of taps, any rows: each tap fetched for itself.
template <class A, class Source>
__global__ void __launch_bounds__(kConvThreads)
    conv_directly(const __grid_constant__ Source s, unsigned column_blocks, int64_t run) {
  constexpr int kColumns = kWidth<A>;
  const ShortConv& conv = s.args.conv;
  const ConvPlace at = ConvPlace::of_thread<A>(s.args, column_blocks, run);
  if (at.column >= s.args.hidden) return;
  const int64_t h = at.stream;
  const int64_t count = s.args.hidden - at.column;
  SequenceCursor cursor(conv, s.args.tokens, at.begin);
  for (int64_t t = at.begin; t < at.end; ++t) {
    if (is_image(s, t)) {
      s.template image<A, false>(t, h, at.column, count);
      continue;
    }
    const SequenceAt& sequence = cursor.of(t);
    Pack value{};
    float c[kColumns] = {};
#pragma unroll 1
    for (int64_t k = 0; k < conv.taps; ++k) {
      const int64_t from = t - conv_lag(conv.taps, conv.dilation, k);
      if (from < sequence.begin && conv.state.data == nullptr) continue;
      const float* state = from < sequence.begin ? state_row(conv, sequence, from, h) : nullptr;
      const bool reads = state == nullptr && !is_image(s, from);
      const float scale = reads ? s.scale(from, h) : 0.0f;
      value = reads ? cuda::load_pack<false>(value_row<A>(s, from, h) + at.column, count) : Pack{};
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (i >= count) continue;
        float u = 0;
        if (state != nullptr) u = state[at.column + i];
        if (reads) {
          u = conv_normalised(column<A>(value, i), scale, norm_weight(conv, h, at.column + i));
        }
        c[i] = fmaf(tap_weight(conv, h, at.column + i, k), u, c[i]);
      }
    }
    Pack other{};
    if constexpr (Source::kOther) {
      other = cuda::load_pack<false>(s.template other<A>(t, h) + at.column, count);
    }
    // The last tap is t itself.
    s.template finish<A, false>(t, h, at.column, value, other, c, count);
  }
}

// The state that a sequence leaves behind: a thread per sequence and column, rows in ascending
// order, for a state that is updated in place moves down.
template <class A, class Source>
struct NextState {
  Source s;

  __device__ void operator()(int64_t i) const {
    const ConvForwardArgs& a = s.args;
    const ShortConv& conv = a.conv;
    const int64_t column_of_row = i % a.hidden;
    const int64_t h = i / a.hidden % a.streams;
    const int64_t b = i / a.hidden / a.streams;
    const bool alone = conv.cu_seqlens == nullptr;
    const SequenceAt sequence = {b, alone ? 0 : conv.cu_seqlens[b],
                                 alone ? a.tokens : conv.cu_seqlens[b + 1]};
    const int64_t history = conv_history(conv.taps, conv.dilation);
    const float norm = norm_weight(conv, h, column_of_row);
    float* to = conv.next_state.data + b * conv.next_state.sequence_stride +
                h * conv.next_state.stream_stride + column_of_row;
    const auto input = [&](int64_t t) {
      if (t < sequence.begin) return state_row(conv, sequence, t, h)[column_of_row];
      if (is_image(s, t)) return 0.0f;
      const A value = value_row<A>(s, t, h)[column_of_row];
      Pack pack{{cuda::bits_of(value)}};
      return conv_normalised(column<A>(pack, 0), s.scale(t, h), norm);
    };
    constexpr int kTogether = 8;  // read before they are written
    for (int64_t first = 0; first < history; first += kTogether) {
      float u[kTogether];
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        if (first + r < history) u[r] = input(sequence.end - history + first + r);
      }
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        if (first + r < history) to[(first + r) * conv.next_state.position_stride] = u[r];
      }
    }
  }
};

// `vector`: all other rows of the source move in packs of 16 bytes too.
template <class Source>
void launch_conv(const char* name, int device, void* stream, const Source& s, bool vector) {
  const ConvForwardArgs& a = s.args;
  const auto size = static_cast<int64_t>(size_of(a.activation));
  const bool chains = vector && a.conv.taps == kChainTaps && a.hidden * size % 16 == 0 &&
                      is_vector(a.gated_value, size, a.value_token_stride, a.value_stream_stride);
  cuda::with_activation(a.activation, [&](auto activation) {
    using A = decltype(activation);
    if (a.tokens > 0) {
      const int64_t packs = cuda::packs_of(a.hidden, kWidth<A>);
      const int64_t column_blocks = (packs + kConvThreads - 1) / kConvThreads;
      const int64_t threads = (packs + column_blocks * 32 - 1) / (column_blocks * 32) * 32;
      // Long enough that the history before it costs little, short enough for many blocks.
      constexpr int64_t kBlocks = 2048;
      const int64_t share = a.tokens * column_blocks * a.streams / kBlocks;
      const int64_t history = conv_history(a.conv.taps, a.conv.dilation);
      const int64_t run = std::clamp<int64_t>(share, std::min<int64_t>(8, a.tokens),
                                              8 * std::max<int64_t>(8, history));
      const auto kernel = chains ? &conv_chains<A, Source> : &conv_directly<A, Source>;
      cuda::launch(name, device, stream, kernel,
                   dim3(cuda::blocks((a.tokens + run - 1) / run * a.streams * column_blocks)),
                   dim3(static_cast<unsigned>(threads)), 0, s, column_blocks, run);
    }
    if (a.conv.next_state.data != nullptr) {
      cuda::launch_each(name, device, stream, a.conv.sequences * a.streams * a.hidden,
                        NextState<A, Source>{s});
    }
  });
}

}  // namespace ehc::engram
