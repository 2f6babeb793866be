// The convolution's backward pass on CUDA, shared by engram.conv_bwd and engram.layer_bwd.
//
//   gc[t] = G[t] * silu'(c[t])                          F32[T,n,d], written
//   gu[t] = sum_j W[w-1-j] gc[t + j*dilation]           made twice, not written
//   gV[t] = G[t] + r (g gu - n mean(g gu n))            n = V r
//   S[w-1-j] = sum_t gc[t + j*dilation] n[t]; grad_W = g S, grad_g = sum_k W[k] S[k]
//
// Steps: gc by the forward's kernels; S over chunks of tokens and the row sums of g gu n, warp by
// warp; means; gV; sums of the chunks. Class R: row sums depend on d and the type alone, S is
// summed in token order over chunks that T alone decides. gV of a token depends on the tokens that
// the convolution names.
#pragma once

#include "ops/engram/conv_bwd/conv_bwd_args.h"
#include "ops/engram/conv_bwd/conv_bwd_math.h"
#include "ops/engram/shared/conv_grad_arrays.h"
#include "ops/engram/shared/conv_rows.cuh"

namespace ehc::engram {

struct ConvGradients {
  static constexpr bool kOther = true;  // G
  ConvForwardArgs args;                 // the rows of V, or v for all streams; `out` is not used
  const void* grad_out;                 // G
  int64_t grad_token_stride, grad_stream_stride;
  const float* scales;  // [T,n]: n = value * scale
  const float* rstd;    // [T,n]: r
  float* grad_conv;     // gc
  float* row_sums;      // [T,n,warps]
  float* means;         // [T,n]
  float* grad_value;    // gV as F32 [T,n,d], or null for
  void* grad_rows;      // A[T,n,d]
  int64_t grad_rows_token_stride, grad_rows_stream_stride;
  ConvPartials partials;

  // gc and gV in fp32: rows on borders of 16 bytes.
  EHC_HD int64_t row() const { return conv_prepared_row(args.hidden); }
  EHC_HD int64_t row_at(int64_t t, int64_t h) const { return (t * args.streams + h) * row(); }
  EHC_HD int64_t warps() const { return row() / 32; }  // room for any type
  __device__ __forceinline__ float scale(int64_t t, int64_t h) const {
    return scales[t * args.streams + h];
  }
  template <class A>
  __device__ __forceinline__ const A* other(int64_t t, int64_t h) const {
    return static_cast<const A*>(grad_out) + t * grad_token_stride + h * grad_stream_stride;
  }

  // --- gc, as a source of conv_rows.cuh ---

  template <int kCount>
  __device__ __forceinline__ void put(float* to, const float (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      *reinterpret_cast<float4*>(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
  }
  template <class A, bool kVector>
  __device__ __forceinline__ void finish(int64_t t, int64_t h, int at, const Pack&,
                                         const Pack& grad, const float (&c)[kWidth<A>],
                                         int64_t count) const {
    float gc[kWidth<A>];
#pragma unroll
    for (int i = 0; i < kWidth<A>; ++i) {
      gc[i] = i < count ? column<A>(grad, i) * fast_silu_slope(c[i]) : 0.0f;
    }
    put(grad_conv + row_at(t, h) + at, gc);
  }
  template <class A, bool kVector>
  __device__ __forceinline__ void image(int64_t t, int64_t h, int at, int64_t) const {
    constexpr float kZeros[kWidth<A>] = {};
    put(grad_conv + row_at(t, h) + at, kZeros);
  }
};

// The weights of a thread's columns: in registers where there are four taps.
template <class A, bool kFour>
struct ColumnWeights {
  static constexpr int kColumns = kWidth<A>;
  const ShortConv& conv;
  int64_t stream;
  int column;
  int count;
  float norm[kColumns];
  float tap[kFour ? kChainTaps : 1][kColumns];

  __device__ __forceinline__ ColumnWeights(const ShortConv& of, int64_t h, int at, int64_t columns)
      : conv(of), stream(h), column(at), count(static_cast<int>(max(int64_t{0}, columns))) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      norm[i] = i < count ? norm_weight(conv, h, at + i) : 0.0f;
      if constexpr (kFour) {
#pragma unroll
        for (int k = 0; k < kChainTaps; ++k) {
          tap[k][i] = i < count ? tap_weight(conv, h, at + i, k) : 0.0f;
        }
      }
    }
  }
  // gu of token t of a sequence; use(j, gc) sees gc of the token j * dilation later.
  template <class Use>
  __device__ __forceinline__ void input_gradient(const ConvGradients& a, const SequenceAt& sequence,
                                                 int64_t t, float (&gu)[kColumns],
                                                 const Use& use) const {
    const int64_t seen = conv_seen_by(conv.taps, conv.dilation, sequence.end - 1 - t);
    const auto add = [&](int j) {
      const float* from = a.grad_conv + a.row_at(t + j * conv.dilation, stream) + column;
      float gc[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + i);
        gc[i] = four.x, gc[i + 1] = four.y, gc[i + 2] = four.z, gc[i + 3] = four.w;
      }
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        float weight = 0;
        if constexpr (kFour) {
          weight = tap[kChainTaps - 1 - j][i];
        } else {
          if (i < count) weight = tap_weight(conv, stream, column + i, conv.taps - 1 - j);
        }
        gu[i] = fmaf(weight, gc[i], gu[i]);
      }
      use(j, gc);
    };
#pragma unroll
    for (float& x : gu) x = 0;
    if (count == 0) return;
    if constexpr (kFour) {
#pragma unroll
      for (int j = 0; j < kChainTaps; ++j) {
        if (j < seen) add(j);
      }
    } else {
      for (int j = 0; j < seen; ++j) add(j);
    }
  }
  __device__ __forceinline__ void load_normal(const ConvGradients& a, int64_t t, bool vector,
                                              float (&n)[kColumns]) const {
    const A* from = value_row<A>(a, t, stream) + column;
    const Pack value = vector && count > 0 ? cuda::load_pack<true>(from, count)
                                           : cuda::load_pack<false>(from, count);
    const float scale = a.scale(t, stream);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) n[i] = column_of(value, i) * scale;
  }
  __device__ __forceinline__ static float column_of(const Pack& pack, int i) {
    return cuda::column<A>(pack, i);
  }
};

// S of a chunk and the row sums of its tokens.
template <class A, bool kFour>
__global__ void __launch_bounds__(128)
    conv_chunk_sums(const __grid_constant__ ConvGradients a, bool vector, unsigned column_blocks,
                    int64_t chunk_tokens) {
  constexpr int kColumns = kWidth<A>;
  const ShortConv& conv = a.args.conv;
  const ConvPlace at = ConvPlace::of_thread<A>(a.args, column_blocks, chunk_tokens);
  const int64_t h = at.stream;
  const ColumnWeights<A, kFour> weights(conv, h, at.column, a.args.hidden - at.column);
  const int64_t warp = at.column / kColumns / cuda::kWarp;
  float sums[kFour ? kChainTaps : 1][kColumns] = {};
  SequenceCursor cursor(conv, a.args.tokens, at.begin);
  for (int64_t t = at.begin; t < at.end; ++t) {
    if (is_image(a, t)) continue;
    float n[kColumns], gu[kColumns];
    weights.load_normal(a, t, vector, n);
    weights.input_gradient(a, cursor.of(t), t, gu, [&](int j, const float(&gc)[kColumns]) {
      if constexpr (kFour) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sums[j][i] = fmaf(gc[i], n[i], sums[j][i]);
      }
    });
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (i < weights.count) sum = fmaf(gu[i] * weights.norm[i], n[i], sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % cuda::kWarp == 0 && warp < a.warps()) {
      a.row_sums[(t * a.args.streams + h) * a.warps() + warp] = sum;
    }
  }
  if (weights.count == 0) return;
  float* to = a.partials.of(at.begin / chunk_tokens, h) + at.column;
  if constexpr (kFour) {
#pragma unroll
    for (int j = 0; j < kChainTaps; ++j) a.put(to + (kChainTaps - 1 - j) * a.partials.row, sums[j]);
  } else {
    for (int64_t j = 0; j < conv.taps; ++j) {
      SequenceCursor again(conv, a.args.tokens, at.begin);
#pragma unroll
      for (float& x : sums[0]) x = 0;
      for (int64_t t = at.begin; t < at.end; ++t) {
        if (is_image(a, t) || t + j * conv.dilation >= again.of(t).end) continue;
        float n[kColumns];
        weights.load_normal(a, t, vector, n);
        const float* gc = a.grad_conv + a.row_at(t + j * conv.dilation, h) + at.column;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sums[0][i] = fmaf(gc[i], n[i], sums[0][i]);
      }
      a.put(to + (conv.taps - 1 - j) * a.partials.row, sums[0]);
    }
  }
}

// The mean of g gu n over a row.
template <class A>
struct RowMean {
  ConvGradients a;

  __device__ void operator()(int64_t i) const {
    if (is_image(a, i / a.args.streams)) return;  // its sums were never written
    const int64_t warps = (a.args.hidden + cuda::kWarp * kWidth<A> - 1) / (cuda::kWarp * kWidth<A>);
    float sum = 0;
    for (int64_t w = 0; w < warps; ++w) sum += a.row_sums[i * a.warps() + w];
    a.means[i] = sum / static_cast<float>(a.args.hidden);
  }
};

template <class A, bool kFour>
__global__ void __launch_bounds__(128)
    conv_grad_values(const __grid_constant__ ConvGradients a, bool vector, unsigned column_blocks,
                     int64_t run) {
  constexpr int kColumns = kWidth<A>;
  const ShortConv& conv = a.args.conv;
  const ConvPlace at = ConvPlace::of_thread<A>(a.args, column_blocks, run);
  if (at.column >= a.args.hidden) return;
  const int64_t h = at.stream;
  const int64_t count = a.args.hidden - at.column;
  const ColumnWeights<A, kFour> weights(conv, h, at.column, count);
  SequenceCursor cursor(conv, a.args.tokens, at.begin);
  for (int64_t t = at.begin; t < at.end; ++t) {
    float grad[kColumns] = {};
    if (!is_image(a, t)) {
      float n[kColumns], gu[kColumns];
      const A* out = a.template other<A>(t, h) + at.column;
      const Pack of_out =
          vector ? cuda::load_pack<true>(out, count) : cuda::load_pack<false>(out, count);
      weights.load_normal(a, t, vector, n);
      weights.input_gradient(a, cursor.of(t), t, gu, [](int, const float(&)[kColumns]) {});
      const float rstd = a.rstd[t * a.args.streams + h];
      const float mean = a.means[t * a.args.streams + h];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const float pulled = fmaf(gu[i], weights.norm[i], -(n[i] * mean));
        grad[i] = fmaf(rstd, pulled, column<A>(of_out, i));
      }
    }
    if (a.grad_value != nullptr) {
      a.put(a.grad_value + a.row_at(t, h) + at.column, grad);
      continue;
    }
    A* to = static_cast<A*>(a.grad_rows) + t * a.grad_rows_token_stride +
            h * a.grad_rows_stream_stride + at.column;
    const Pack pack = cuda::make_pack<A>([&](int i) { return grad[i]; });
    if (vector) {
      cuda::store_pack<true>(to, pack, count);
    } else {
      cuda::store_pack<false>(to, pack, count);
    }
  }
}

// What becomes of S: a thread per column.
struct ConvWeightSums {
  ConvPartials partials;
  ShortConv conv;
  int64_t hidden;
  ConvWeightGradient of_taps, of_norm;

  __device__ void put(const ConvWeightGradient& to, int64_t h, int64_t i, int64_t k,
                      float sum) const {
    float& out = to.data[h * to.stream_stride + i * to.channel_stride + k];
    if (to.target == nullptr) {
      out = sum;
      return;
    }
    const float before = to.target[h * to.target_stream_stride + i * to.target_channel_stride + k];
    out = partials.chunks > 0 ? before + sum : before;
  }
  __device__ void operator()(int64_t at) const {
    const int64_t h = at / hidden;
    const int64_t i = at % hidden;
    const float norm = norm_weight(conv, h, i);
    float of_norm_weight = 0;
    for (int64_t k = 0; k < conv.taps; ++k) {
      float sum = 0;
#pragma unroll 16
      for (int64_t p = 0; p < partials.chunks; ++p) {
        sum += __ldg(partials.of(p, h) + k * partials.row + i);
      }
      of_norm_weight = fmaf(tap_weight(conv, h, i, k), sum, of_norm_weight);
      put(of_taps, h, i, k, norm * sum);
    }
    put(of_norm, h, i, 0, of_norm_weight);
  }
};

// Everything but the norms; `vector`: rows of values, G and gV move in packs of 16 bytes.
void conv_gradients_cuda(const char* name, const ConvGradients& args, const ConvSumArgs& sums,
                         bool vector, int device, void* stream);

}  // namespace ehc::engram
