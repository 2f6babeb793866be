// engram.layer_fwd with a convolution on CUDA (sm_80+).
//
//   H' = round(x + alpha*v + silu(c)), c[t] = sum_k W[k] * u[t - (w-1-k)*dilation]
//   u = (v * beta) * g, beta = alpha / sqrt(alpha^2 mean(v^2) + eps), which is RMSNorm(alpha*v) * g
//   x, k, H' A[T,n,d]; v A[T,d]; alpha as in the gate
//
// Bytes: (8n+4)d a token in 16-bit types.
// Algorithm: the statistics of the gate by its own kernel, then the convolution (conv_rows.cuh),
// which reads x and v again. Class R, batch-invariant, a chunk after a state has the bits of one
// pass; the gates have the bits of engram.gate_fwd.
#include "ops/engram/layer/layer_args.h"
#include "ops/engram/shared/conv_rows.cuh"
#include "ops/engram/shared/layer_rows.cuh"

namespace ehc::engram {

void gate_fwd_cuda(const GateForwardArgs& args, int device, void* stream);

namespace {

struct LayerRows {
  static constexpr bool kOther = true;  // x
  ConvForwardArgs args;                 // `gated_value` is v, the same for all streams
  const void* residual;
  int64_t residual_token_stride, residual_stream_stride;
  StreamStatistic alpha;
  const float* value_mean_square;
  bool round_twice;

  __device__ __forceinline__ float alpha_of(int64_t t, int64_t h) const {
    return alpha.data[t * alpha.token_stride + h];
  }
  __device__ __forceinline__ float scale(int64_t t, int64_t h) const {
    return conv_beta(alpha_of(t, h), value_mean_square[t], args.conv.eps);
  }
  template <class A>
  __device__ __forceinline__ const A* other(int64_t t, int64_t h) const {
    return static_cast<const A*>(residual) + t * residual_token_stride + h * residual_stream_stride;
  }
  template <class A, bool kVector>
  __device__ __forceinline__ void finish(int64_t t, int64_t h, int at, const Pack& value,
                                         const Pack& x, const float (&c)[kWidth<A>],
                                         int64_t count) const {
    const float gate = alpha_of(t, h);
    put<A, kVector>(args, t, h, at,
                    round_twice ? layer_pack<A, true>(gate, value, x, c)
                                : layer_pack<A, false>(gate, value, x, c),
                    count);
  }
  template <class A, bool kVector>
  __device__ __forceinline__ void image(int64_t t, int64_t h, int at, int64_t count) const {
    put<A, kVector>(args, t, h, at, cuda::load_pack<kVector>(other<A>(t, h) + at, count), count);
  }
};

}  // namespace

void layer_fwd_cuda(const LayerForwardArgs& a, int device, void* stream) {
  const GateForwardArgs& gate = a.gate;
  GateForwardArgs statistics = gate;
  statistics.mode = GateMode::stats;
  gate_fwd_cuda(statistics, device, stream);
  ConvForwardArgs conv;
  conv.tokens = gate.tokens;
  conv.streams = gate.streams;
  conv.hidden = gate.hidden;
  conv.activation = gate.activation;
  conv.gated_value = gate.value;
  conv.value_token_stride = gate.value_token_stride;
  conv.image_token_mask = gate.image_token_mask;
  conv.out = gate.out;
  conv.out_token_stride = gate.out_token_stride;
  conv.out_stream_stride = gate.out_stream_stride;
  conv.conv = a.conv;
  const auto size = static_cast<int64_t>(size_of(gate.activation));
  const bool vector =
      is_vector(gate.out, size, gate.out_token_stride, gate.out_stream_stride) &&
      is_vector(gate.residual, size, gate.residual_token_stride, gate.residual_stream_stride);
  launch_conv(
      "engram.layer_fwd", device, stream,
      LayerRows{conv, gate.residual, gate.residual_token_stride, gate.residual_stream_stride,
                gate.alpha, gate.value_mean_square, a.round_twice},
      vector);
}

}  // namespace ehc::engram
